// Inverse of I + L, L a 64 x 64 strictly lower triangular fp32 matrix, to fp32 accuracy by four warps; rounded to E.
//
// In blocks of 16 x 16, forward substitution:
//
//     A_jj = D_j = (I + L_jj)^-1,    A_ij = -D_i (L_ij A_jj + ... + L_i,i-1 A_i-1,j)   for i > j
//
// Warp j inverts diagonal block j by substitution, one lane a column, in fp32 FMAs. After a barrier it has all of block
// column j to itself: 9, 5, 2 and 0 products for j = 0..3. They run on the tensor cores, each as three products of tf32
// parts (high high + high low + low high): on identical keys with beta near 2 the error is that of fp32 FMAs, 5e-6 of
// the largest entry in a model of the arithmetic, where single tf32 products leave 4e-2, truncated high parts 7e-5.
// The products are transposed, A_ij^T = -(sum A_mj^T L_im^T) D_i^T: so a block column's own results are left operands
// straight from the accumulators, and L and D are right operands as they lie in shared memory.
//
// Summation order: substitution over columns ascending; a block's sum over m ascending, high products and cross
// products in accumulators of their own, added at the end.
#pragma once

#include "cuda/ptx/mma_tf32.cuh"
#include "cuda/tile/tile.cuh"

namespace cake_gdn::cuda {

// The ten 16 x 16 blocks on and below the diagonal, rows of 16 floats. The halves of a row are swapped in every other
// pair of rows: eight lanes' float2 of four rows each meet no bank twice.
struct LowerBlocks {
    static constexpr int kBytes = 10 * 16 * 16 * 4;

    float *data;  // 16-byte aligned, shared

    __device__ __forceinline__ float *at(int block_row, int block_column, int row, int column) const {
        return data + (block_row * (block_row + 1) / 2 + block_column) * 256 + row * 16 + (column ^ ((row & 2) << 2));
    }
};

// D_b in place of L_bb (whose entries on and above the diagonal are not read). One warp, which alone wrote the block,
// after __syncwarp().
__device__ __forceinline__ void invert_diagonal(LowerBlocks m, int b) {
    const int lane = threadIdx.x % 32, column = lane % 16;
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = i == column ? 1.0f : 0.0f;
    // Four columns of L at a time: every row below has four terms to add that wait for nobody.
#pragma unroll
    for (int panel = 0; panel < 16; panel += 4) {
#pragma unroll
        for (int i = panel + 1; i < 16; ++i) {
            const float4 row = *reinterpret_cast<const float4 *>(m.at(b, b, i, panel));
            const float l[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                if (panel + k < i) x[i] = fmaf(-l[k], x[panel + k], x[i]);
            }
        }
    }
    __syncwarp();
    if (lane < 16) {
#pragma unroll
        for (int i = 0; i < 16; ++i) *m.at(b, b, i, column) = x[i];
    }
}

// A 16 x 16 block in tf32 parts as a left operand: k step s = columns 8 s..8 s + 7, of which slot q of the reduction
// index is column 2 q and slot q + 4 column 2 q + 1, as the accumulators have them.
struct SplitBlock {
    uint32_t high[2][4], low[2][4];

    __device__ __forceinline__ void set(const float (&x)[2][4]) {
#pragma unroll
        for (int s = 0; s < 2; ++s) {
#pragma unroll
            for (int e = 0; e < 4; ++e) ptx::split_tf32(x[s][(e >> 1) | (e & 1) << 1], high[s][e], low[s][e]);
        }
    }
};

// high + cross += x M^T, M block (block_row, block_column) of m.
__device__ __forceinline__ void add_product(float (&high)[2][4], float (&cross)[2][4], const SplitBlock &x,
                                            LowerBlocks m, int block_row, int block_column) {
    const int lane = threadIdx.x % 32, r = lane / 4, c = 2 * (lane % 4);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const float2 b = *reinterpret_cast<const float2 *>(m.at(block_row, block_column, 8 * n + r, 8 * s + c));
            uint32_t high0, low0, high1, low1;
            ptx::split_tf32(b.x, high0, low0);
            ptx::split_tf32(b.y, high1, low1);
            ptx::mma_tf32(high[n], x.high[s], high0, high1);
            ptx::mma_tf32(cross[n], x.low[s], high0, high1);
            ptx::mma_tf32(cross[n], x.high[s], low0, low1);
        }
    }
}

// Block column j = warp of A, rounded to E, into `a`, zero above the diagonal. Four warps; `m` holds L with D on the
// diagonal, complete and visible to all of them. There is a barrier between the last read of `m` and the first write of
// `a`, which may lie in the same memory; the caller places the one after.
template <class E>
__device__ __forceinline__ void invert_columns(LowerBlocks m, Tile<64> a, int j) {
    const int lane = threadIdx.x % 32, r = lane / 4, c = 2 * (lane % 4), odd = r & 1;
    SplitBlock column[3];   // A_(j + d, j)^T
    uint32_t out[4][2][2];  // the same in E: pairs of neighbouring columns of A
    // Lane r has column r of rows c and c + 1; with lane r ^ 1 it makes a pair of one row each.
    const auto keep = [&](uint32_t (&to)[2][2], const float (&x)[2][4]) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float first = x[n][2 * half], second = x[n][2 * half + 1];
                const float other = __shfl_xor_sync(0xffffffffu, odd ? first : second, 4);
                to[n][half] = ptx::pack<E>(odd ? other : first, odd ? second : other);
            }
        }
    };
    {
        float x[2][4];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) x[n][e] = *m.at(j, j, 8 * n + c + (e & 1), r + 8 * (e >> 1));
        }
        column[0].set(x);
        keep(out[0], x);
    }
#pragma unroll
    for (int d = 1; d < 4; ++d) {
        if (j + d > 3) break;
        float high[2][4] = {}, cross[2][4] = {};
#pragma unroll
        for (int e = 0; e < d; ++e) add_product(high, cross, column[e], m, j + d, j + e);
        SplitBlock sum;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) high[n][e] += cross[n][e];
        }
        sum.set(high);
        float x[2][4] = {}, x_cross[2][4] = {};
        add_product(x, x_cross, sum, m, j + d, j + d);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) x[n][e] = -(x[n][e] + x_cross[n][e]);
        }
        if (d < 3) column[d].set(x);
        keep(out[d], x);
    }
    __syncthreads();
#pragma unroll
    for (int block = 0; block < 4; ++block) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // Block 0..3 - j: what was computed; the others: the blocks above the diagonal.
                const bool below = j + block <= 3;
                const int block_row = below ? j + block : 3 - block;
                a.store_pair(16 * block_row + 8 * n + c + odd, 16 * j + (r & ~1) + 8 * half,
                             below ? out[block][n][half] : 0u);
            }
        }
    }
}

}  // namespace cake_gdn::cuda
