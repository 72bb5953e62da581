// A lane's accumulators of a product beside the same elements of a tile, and sums of them over rows and columns.
#pragma once

#include "cuda/tile/tile.cuh"

namespace cake_gdn::cuda {

// One row of a tile where a lane's accumulators lie: accumulator t's pair in columns n0 + 8 t + 2 (lane % 4), + 1. Its
// address is one xor away, since rows are 256 bytes, tiles aligned to as much and n0 a multiple of 64: none is worth
// keeping in a register.
struct PairRow {
    uint32_t first;

    __device__ __forceinline__ PairRow(Tile<128> tile, int row, int n0 = 0)
        : first(tile.pair(row, n0 + 2 * (threadIdx.x % 4))) {}
    // All loads before the first store: a store waits for the loads before it, and holds up those after it.
    template <int NT>
    __device__ __forceinline__ void load(uint32_t (&bits)[NT]) const {
#pragma unroll
        for (int t = 0; t < NT; ++t) bits[t] = ptx::load_shared_32(first ^ t << 4);
    }
    __device__ __forceinline__ void store(int t, uint32_t bits) const { ptx::store_shared(first ^ t << 4, bits); }
};

// A lane's share of the dot product of one of its two accumulator rows with the same row of a tile, whose pairs are
// `bits`: columns ascending.
template <class E, int NT>
__device__ __forceinline__ float lane_dot(const float (&acc)[NT][4], int half, const uint32_t (&bits)[NT]) {
    float sum = 0.0f;
#pragma unroll
    for (int t = 0; t < NT; ++t) {
        const float2 x = ptx::unpack<E>(bits[t]);
        sum = fmaf(acc[t][2 * half], x.x, sum);
        sum = fmaf(acc[t][2 * half + 1], x.y, sum);
    }
    return sum;
}

// Several sums over lanes at once, each lane left with one of them: of v[i] over the `Count` lanes that differ in bits
// Bit, Bit / 2, .. of their number, that lane keeps the sum whose i has the bits of the lane. A tree, the largest bit
// first. With Bit = 2 the lanes share an accumulator row, with Bit = 16 and Count = 8 a pair of columns.
template <int Bit, int Count>
__device__ __forceinline__ float scatter_sums(float (&v)[Count]) {
#pragma unroll
    for (int n = Count / 2, bit = Bit; n > 0; n /= 2, bit /= 2) {
        const bool upper = threadIdx.x & bit;
#pragma unroll
        for (int i = 0; i < n; ++i) {
            const float kept = upper ? v[i + n] : v[i], given = upper ? v[i] : v[i + n];
            v[i] = kept + __shfl_xor_sync(0xffffffffu, given, bit);
        }
    }
    return v[0];
}

}  // namespace cake_gdn::cuda
