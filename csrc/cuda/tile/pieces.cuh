// A state in flight through registers: a thread's pieces of a 128 x 128 tile, those that copy_rows would deal it. So one
// state is fetched while products with the other still need the tile, meets it element by element, and takes its place.
#pragma once

#include "cuda/tile/chunk.cuh"
#include "cuda/tile/transfer.cuh"

namespace cake_gdn::cuda {

template <int Threads>
struct Pieces {
    using W = Walk<Threads, kD>;
    static constexpr int kCount = kD / W::kDown;
    uint4 bits[kCount];

    __device__ static __forceinline__ uint32_t place(Tile<kD> tile, int i) {
        const W walk;
        return tile.piece(walk.row, walk.column) + i * W::kStep;
    }

    // K rows of whole pieces of V columns, zero past V as the scans left them; zeros elsewhere, and everywhere unless
    // `exists`.
    template <class E>
    __device__ __forceinline__ void load(const E *from, bool exists, int K, int V) {
        const W walk;
        const int Vw = CAKE_GDN_WIDTH(V);
        exists = exists && walk.column < V;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const int row = walk.row + i * W::kDown;
            bits[i] = make_uint4(0, 0, 0, 0);
            if (exists && row < K) bits[i] = __ldg(reinterpret_cast<const uint4 *>(from + row * Vw + walk.column));
        }
    }
    __device__ __forceinline__ void store(Tile<kD> tile) const {
#pragma unroll
        for (int i = 0; i < kCount; ++i) ptx::store_shared(place(tile, i), bits[i]);
    }

    // This thread's share of the sum of all products with the same elements of a tile, rows ascending.
    template <class E>
    __device__ __forceinline__ float product(Tile<kD> tile) const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kCount; ++i) add_products<E>(sum, bits[i], ptx::load_shared_128(place(tile, i)));
        return sum;
    }
    // The same with a user's state in the place of the pieces. Rare and slow: few registers.
    template <class E>
    __device__ static __forceinline__ float product(const StateView &user, int64_t n, int64_t hv, int K, int V,
                                                    Tile<kD> tile) {
        const W walk;
        float sum = 0.0f;
        if (user.data == nullptr || walk.column >= V) return sum;
#pragma unroll 1
        for (int i = 0; i < kCount && walk.row + i * W::kDown < K; ++i) {
            const uint4 bits = user_state_piece<E>(user, n, hv, walk.row + i * W::kDown, walk.column, V);
            add_products<E>(sum, bits, ptx::load_shared_128(place(tile, i)));
        }
        return sum;
    }
};

}  // namespace cake_gdn::cuda
