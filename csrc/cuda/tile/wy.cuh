// What the three programs of the WY representation share.
#pragma once

#include "cuda/tile/chunk.cuh"

namespace cake_gdn::cuda {

// The warp's index, the same register in all lanes: branches on it are the warp's.
__device__ __forceinline__ int warp_index() { return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0); }

// Row i of the strict lower triangle of G: G_ij for j < i, and zero from j = i on. Zero throughout for a row past the
// chunk's length. Without branches, for loops over the accumulators.
struct GateRow {
    float cum;
    int first, end;

    __device__ __forceinline__ GateRow(const Gates &gates, int i, int length)
        : cum(gates.cum[i]), first(gates.reset[i] - 1), end(i < length ? i : 0) {}
    __device__ __forceinline__ float decay(int j, float cum_j) const {
        return exp_of(j >= first && j < end ? cum - cum_j : -INFINITY);
    }
};

// A pair of 16-bit elements times a pair of factors, rounded; a zero factor clears whatever the element is.
template <class E>
__device__ __forceinline__ uint32_t scaled(uint32_t bits, float2 factor) {
    const float2 x = ptx::unpack<E>(bits);
    return ptx::pack<E>(masked(x.x, factor.x), masked(x.y, factor.y));
}

// Columns n0..n0 + 31 of x [64, 128] <- A (factor x), A lower triangular in `a`, the scaled rows and the result rounded
// to E. One warp, to which these columns of x belong. The sum runs over tokens ascending, 16 at a time, up to the row's
// own block: wy and wy_recompute share this function, and so the bits of w and u.
template <class E>
__device__ __forceinline__ void apply_lower(Tile<C> a, Tile<kD> x, int n0, const float *factor) {
    const int c = 2 * (threadIdx.x % 4);
    uint32_t b[4][2][4];
#pragma unroll
    for (int s = 0; s < 4; ++s) {
        const float2 first = *reinterpret_cast<const float2 *>(factor + 16 * s + c);
        const float2 second = *reinterpret_cast<const float2 *>(factor + 16 * s + c + 8);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            x.template load_b<true>(b[s][half], n0 + 16 * half, 16 * s);
#pragma unroll
            for (int e = 0; e < 4; ++e) b[s][half][e] = scaled<E>(b[s][half][e], e & 1 ? second : first);
        }
    }
    __syncwarp();  // every lane's part of x has been read
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float acc[4][4] = {};
#pragma unroll
        for (int s = 0; s <= i; ++s) {
            uint32_t ra[4];
            a.template load_a<false>(ra, 16 * i, 16 * s);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                ptx::mma<E>(acc[2 * half], ra, b[s][half][0], b[s][half][1]);
                ptx::mma<E>(acc[2 * half + 1], ra, b[s][half][2], b[s][half][3]);
            }
        }
        stage_rows<E>(x, acc, 16 * i, n0);
    }
    __syncwarp();
}

// The log of the most by which the chunk's tokens can lengthen a state: the sum of log max(1, |1 - step |k|^2|), since a
// token turns a state into exp(g) (I - step k k^T) of it. Of the warp's 16 tokens, the same in all lanes; two lanes a
// token. `k` [64, 128] as it is multiplied, rows past the chunk's end zero like their `step`.
template <class E>
__device__ __forceinline__ float warp_growth(Tile<kD> k, const float *step) {
    const int row = threadIdx.x / 2, half = threadIdx.x % 2;
    float square = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const uint4 bits = ptx::load_shared_128(k.piece(row, 64 * half + 8 * i));
        const float2 x[4] = {ptx::unpack<E>(bits.x), ptx::unpack<E>(bits.y), ptx::unpack<E>(bits.z),
                             ptx::unpack<E>(bits.w)};
#pragma unroll
        for (int e = 0; e < 4; ++e) square = fmaf(x[e].y, x[e].y, fmaf(x[e].x, x[e].x, square));
    }
    square += __shfl_xor_sync(0xffffffffu, square, 1);
    float growth = logf(fmaxf(1.0f, fabsf(fmaf(-step[row], square, 1.0f))));
#pragma unroll
    for (int delta = 2; delta < 32; delta *= 2) growth += __shfl_xor_sync(0xffffffffu, growth, delta);
    return growth;
}

// The chunk's bound (params/fwd.h: wy), of its warps' growths.
__device__ __forceinline__ float chunk_bound(const Gates &gates, const float (&growth)[4], int length) {
    const int last = length - 1;
    return gates.reset[last] != 0 ? -INFINITY : gates.cum[last] + ((growth[0] + growth[1]) + (growth[2] + growth[3]));
}

}  // namespace cake_gdn::cuda
