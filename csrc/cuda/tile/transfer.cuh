// Whole tiles between global and shared memory by all threads of a block, 16 bytes at a time, for rows that are 16-byte
// aligned. A thread keeps to one column of pieces and walks down the rows in steps of the swizzle's period, so that its
// shared addresses differ by constants and its global ones by one addition.
#pragma once

#include "cuda/ptx/shared.cuh"
#include "cuda/tile/tile.cuh"

namespace cake_gdn::cuda {

template <int Threads, int Width>
struct Walk {
    static constexpr int kAcross = Width / 8, kDown = Threads / kAcross;
    static_assert(Threads % kAcross == 0 && kDown % 8 == 0, "whole rows, whole swizzle periods");
    static constexpr int kStep = kDown * Tile<Width>::kRowBytes;  // of the shared address
    int row, column;
    __device__ __forceinline__ Walk() : row(threadIdx.x / kAcross), column(threadIdx.x % kAcross * 8) {}
};

// Starts the copy of `rows` x `columns` elements (row stride in elements) into a tile of TileRows rows; everything
// outside is zero and is not read.
template <int Threads, int TileRows, class E, int Width>
__device__ __forceinline__ void copy_rows(Tile<Width> tile, const E *from, int64_t stride, int rows, int columns) {
    using W = Walk<Threads, Width>;
    const W walk;
    const uint32_t to = tile.piece(walk.row, walk.column);
    const int bytes = min(16, max(0, 2 * (columns - walk.column)));
    from += walk.row * stride + walk.column;
#pragma unroll
    for (int i = 0; i < TileRows / W::kDown; ++i) {
        ptx::copy_async(to + i * W::kStep, from, walk.row + i * W::kDown < rows ? bytes : 0);
        from += W::kDown * stride;
    }
}

// Writes the rows below `rows` of a tile to global memory, columns below `columns`, a multiple of 8. After a barrier.
template <int Threads, int TileRows, class E, int Width>
__device__ __forceinline__ void store_tile(Tile<Width> tile, E *to, int64_t stride, int rows, int columns) {
    using W = Walk<Threads, Width>;
    const W walk;
    if (walk.column >= columns) return;
    const uint32_t from = tile.piece(walk.row, walk.column);
    uint4 bits[TileRows / W::kDown];
#pragma unroll
    for (int i = 0; i < TileRows / W::kDown; ++i) bits[i] = ptx::load_shared_128(from + i * W::kStep);
    to += walk.row * stride + walk.column;
#pragma unroll
    for (int i = 0; i < TileRows / W::kDown; ++i) {
        // The intrinsic for its width: a plain assignment may be taken apart.
        if (walk.row + i * W::kDown < rows) __stcg(reinterpret_cast<uint4 *>(to), bits[i]);
        to += W::kDown * stride;
    }
}

// Writes rows m0..m0 + 15, columns n0..n0 + N - 1 of a tile to global memory like store_part (tile.cuh), but with all
// loads of a lane under way at once where rows are whole aligned pieces. One warp, which alone wrote that part.
template <int N, class E>
__device__ __forceinline__ void store_own_part(Tile<128> tile, int m0, int n0, E *out, int64_t row_stride,
                                               int64_t column_stride, int rows, int columns) {
    if (column_stride != 1 || row_stride % 8 != 0 || reinterpret_cast<uintptr_t>(out) % 16 != 0 || columns % 8 != 0) {
        return store_part<N>(tile, m0, n0, out, row_stride, column_stride, rows, columns);
    }
    constexpr int kAcross = N / 8, kDown = 32 / kAcross;
    __syncwarp();
    const int row = m0 + threadIdx.x % 32 / kAcross, column = n0 + threadIdx.x % kAcross * 8;
    uint4 bits[16 / kDown];
#pragma unroll
    for (int i = 0; i < 16 / kDown; ++i) bits[i] = ptx::load_shared_128(tile.piece(row + kDown * i, column));
    __syncwarp();
    if (column >= columns) return;
    out += row * row_stride + column;
#pragma unroll
    for (int i = 0; i < 16 / kDown; ++i) {
        if (row + kDown * i < rows) __stcg(reinterpret_cast<uint4 *>(out), bits[i]);
        out += kDown * row_stride;
    }
}

// All columns of the tile.
template <class E>
__device__ __forceinline__ void store_own_rows(Tile<128> tile, int m0, E *out, int64_t row_stride,
                                               int64_t column_stride, int rows, int columns) {
    store_own_part<128>(tile, m0, 0, out, row_stride, column_stride, rows, columns);
}

}  // namespace cake_gdn::cuda
