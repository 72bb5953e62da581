// Matrices of 16-bit elements in shared memory: 64 or 128 rows of `Width` elements, 16-byte pieces swizzled within a row
// so that ldmatrix, whose eight lanes read one piece of eight neighbouring rows, meets no bank twice.
//
//   byte offset of element (r, c) = r * 2 Width + ((c / 8) ^ f(r)) * 16 + 2 (c % 8)
//   f(r) = r % 8 for Width >= 64 (a row is at least 128 bytes), (r / 2) % 4 for Width = 32 (two rows are)
#pragma once

#include "cuda/ptx/async_copy.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared.cuh"

namespace cake_gdn::cuda {

template <int Width_>
struct Tile {
    static_assert(Width_ == 32 || Width_ == 64 || Width_ == 128, "the swizzle is written for these");
    static constexpr int Width = Width_;
    static constexpr int kRowBytes = 2 * Width;
    static constexpr int bytes(int rows) { return rows * kRowBytes; }

    uint32_t base;  // shared address, a multiple of 128

    __device__ static constexpr int swizzle(int row) { return Width == 32 ? (row >> 1) & 3 : row & 7; }

    // Shared address of the 16-byte piece that holds (row, column..column + 7); column a multiple of 8.
    __device__ __forceinline__ uint32_t piece(int row, int column) const {
        return base + row * kRowBytes + (((column >> 3) ^ swizzle(row)) << 4);
    }
    // The same at column k + 8 half, k a multiple of 16. All k of a row differ from one another by a constant's exclusive
    // or: a loop over k needs no register for each.
    __device__ __forceinline__ uint32_t piece(int row, int k, int half) const {
        return base + row * kRowBytes + (((half ^ swizzle(row)) << 4) ^ (k << 1));
    }
    // Shared address of the pair (row, column), (row, column + 1); column even.
    __device__ __forceinline__ uint32_t pair(int row, int column) const {
        return piece(row, column & ~7) + (column & 7) * 2;
    }
    __device__ __forceinline__ void store_pair(int row, int column, uint32_t bits) const {
        ptx::store_shared(pair(row, column), bits);
    }
    __device__ __forceinline__ uint32_t load_pair(int row, int column) const {
        return ptx::load_shared_32(pair(row, column));
    }

    // ---- operands of mma (ptx/mma.cuh); `transposed` means that the tile's rows run over the reduction index ----

    // A, 16 x 16 at (m, k).
    template <bool transposed>
    __device__ __forceinline__ void load_a(uint32_t (&r)[4], int m, int k) const {
        const int lane = threadIdx.x % 32, q = lane / 8, row = lane % 8;
        if constexpr (transposed) {
            ptx::ldmatrix_transposed(r, piece(k + row + (q >> 1) * 8, m + (q & 1) * 8));
        } else {
            ptx::ldmatrix(r, piece(m + row + (q & 1) * 8, k, q >> 1));
        }
    }
    // B, 16 x 16 at (k, n): r[0], r[1] for columns n..n + 7, r[2], r[3] for n + 8..n + 15.
    template <bool transposed>
    __device__ __forceinline__ void load_b(uint32_t (&r)[4], int n, int k) const {
        const int lane = threadIdx.x % 32, q = lane / 8, row = lane % 8;
        if constexpr (transposed) {
            ptx::ldmatrix_transposed(r, piece(k + row + (q & 1) * 8, n + (q >> 1) * 8));
        } else {
            ptx::ldmatrix(r, piece(n + row + (q >> 1) * 8, k, q & 1));
        }
    }
};

// acc[i][j] += A(m0 + Apart i, ...) B(..., n0 + 8 j) over k in [k_begin, k_end), multiples of 16, ascending. NT is even.
// A smaller Unroll holds fewer operands in registers.
template <class E, bool TransposedA, bool TransposedB, int Unroll = 2, int Apart = 16, int MT, int NT, int WA, int WB>
__device__ __forceinline__ void warp_gemm(float (&acc)[MT][NT][4], Tile<WA> a, int m0, Tile<WB> b, int n0, int k_begin,
                                          int k_end) {
#pragma unroll Unroll
    for (int k = k_begin; k < k_end; k += 16) {
        uint32_t ra[MT][4];
#pragma unroll
        for (int i = 0; i < MT; ++i) a.template load_a<TransposedA>(ra[i], m0 + Apart * i, k);
#pragma unroll
        for (int j = 0; j < NT; j += 2) {
            uint32_t rb[4];
            b.template load_b<TransposedB>(rb, n0 + 8 * j, k);
#pragma unroll
            for (int i = 0; i < MT; ++i) {
                ptx::mma<E>(acc[i][j], ra[i], rb[0], rb[1]);
                ptx::mma<E>(acc[i][j + 1], ra[i], rb[2], rb[3]);
            }
        }
    }
}

// The same with A in registers: ra[s] is the operand of k step s (accumulator columns 16 s.. packed by pack_operand), for
// the steps from `begin` to `end`.
template <class E, bool TransposedB, int STEPS, int NT, int WB>
__device__ __forceinline__ void warp_gemm_registers(float (&acc)[NT][4], const uint32_t (&ra)[STEPS][4], Tile<WB> b,
                                                    int n0, int begin = 0, int end = STEPS) {
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        if (s < begin || s >= end) continue;
#pragma unroll
        for (int j = 0; j < NT; j += 2) {
            uint32_t rb[4];
            b.template load_b<TransposedB>(rb, n0 + 8 * j, 16 * s);
            ptx::mma<E>(acc[j], ra[s], rb[0], rb[1]);
            ptx::mma<E>(acc[j + 1], ra[s], rb[2], rb[3]);
        }
    }
}

// A operands of 16 rows at m0 over all columns of a tile.
template <class E, int W>
__device__ __forceinline__ void load_operand(uint32_t (&ra)[W / 16][4], Tile<W> tile, int m0) {
#pragma unroll
    for (int s = 0; s < W / 16; ++s) tile.template load_a<false>(ra[s], m0, 16 * s);
}

// Accumulators of 16 rows x 16 STEPS columns -> A operands of STEPS k steps.
template <class E, int STEPS>
__device__ __forceinline__ void pack_operand(uint32_t (&ra)[STEPS][4], const float (&acc)[2 * STEPS][4]) {
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            ra[s][2 * half] = ptx::pack<E>(acc[2 * s + half][0], acc[2 * s + half][1]);
            ra[s][2 * half + 1] = ptx::pack<E>(acc[2 * s + half][2], acc[2 * s + half][3]);
        }
    }
}

// Calls f(row, column, v0, v1) for each pair of neighbouring accumulators of one 16-row tile at (m0, n0); v0 and v1 are
// references. Lane t has rows m0 + t / 4 and + 8.
template <int NT, class F>
__device__ __forceinline__ void for_pairs(float (&acc)[NT][4], int m0, int n0, F &&f) {
    const int lane = threadIdx.x % 32, row = m0 + lane / 4, column = n0 + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < NT; ++j) {
        f(row, column + 8 * j, acc[j][0], acc[j][1]);
        f(row + 8, column + 8 * j, acc[j][2], acc[j][3]);
    }
}

// value * factor; a zero factor clears whatever the value is.
__device__ __forceinline__ float masked(float value, float factor) { return factor == 0.0f ? 0.0f : value * factor; }

// One warp's 16 accumulator rows at m0, rounded to E, into a tile.
template <class E, int NT, int W>
__device__ __forceinline__ void stage_rows(Tile<W> tile, float (&acc)[NT][4], int m0, int n0 = 0) {
    for_pairs(acc, m0, n0,
              [&](int row, int column, float &a, float &b) { tile.store_pair(row, column, ptx::pack<E>(a, b)); });
}

// Writes rows m0..m0 + 15, columns n0..n0 + N - 1 of a tile to global memory, as far as they lie below `rows` and
// `columns`, 16 bytes a lane where strides and addresses allow it. One warp, which alone wrote that part of the tile.
template <int N, class E, int W>
__device__ __forceinline__ void store_part(Tile<W> tile, int m0, int n0, E *out, int64_t row_stride,
                                           int64_t column_stride, int rows, int columns) {
    __syncwarp();
    const bool wide = column_stride == 1 && row_stride % 8 == 0 && reinterpret_cast<uintptr_t>(out) % 16 == 0;
    constexpr int kPieces = N / 8;
    for (int i = threadIdx.x % 32; i < 16 * kPieces; i += 32) {
        const int row = m0 + i / kPieces, column = n0 + i % kPieces * 8;
        if (row >= rows || column >= columns) continue;
        const uint4 bits = ptx::load_shared_128(tile.piece(row, column));
        E *to = out + row * row_stride + column * column_stride;
        if (wide && column + 8 <= columns) {
            *reinterpret_cast<uint4 *>(to) = bits;
        } else {
            const E *from = reinterpret_cast<const E *>(&bits);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                if (column + e < columns) to[e * column_stride] = from[e];
            }
        }
    }
    __syncwarp();
}

// All columns of the tile.
template <class E, int W>
__device__ __forceinline__ void store_rows(Tile<W> tile, int m0, E *out, int64_t row_stride, int64_t column_stride,
                                           int rows, int columns) {
    store_part<W>(tile, m0, 0, out, row_stride, column_stride, rows, columns);
}

// Sum over the four lanes that share a row of an accumulator tile, the same bits in each of them.
__device__ __forceinline__ float sum_row_lanes(float value) {
    value += __shfl_xor_sync(0xffffffffu, value, 1);
    value += __shfl_xor_sync(0xffffffffu, value, 2);
    return value;
}

}  // namespace cake_gdn::cuda
