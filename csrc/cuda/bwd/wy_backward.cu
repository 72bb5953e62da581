// wy_backward: through w = A (beta e k), u = A (beta v) and A = (I + L)^-1 to k, v, the step size and the gate.
//
//     dr = A^T du,   dkw = A^T dw                      gradients of beta v and of beta e k
//     dM_ij = -dr_i.v_new_j,   P_ij = dM_ij G_ij k_i.k_j,   W_ij = beta_i G_ij dM_ij,   for j < i
//     dv_i = beta_i dr_i
//     dk_i += beta_i e_i dkw_i + sum_j (W_ij + W_ji) k_j
//     dstep_i = dr_i.v_i + e_i dkw_i.k_i + sum_{j<i} P_ij
//     dcum_i += beta_i (e_i dkw_i.k_i + sum_{j<i} P_ij) - sum_{j>i} beta_j P_ji
//
// dL = -tril(A^T du v_new^T, -1) is the pullback of the inverse for both products at once (tests/reference/stages.py).
//
// Tile map. One block of four warps a (chunk, value head), value heads of a chunk next to each other so that k comes
// from L2. Warp i computes rows 16 i..16 i + 15 of everything: dr [64, V], then dM and k k^T up to the diagonal
// [64, 64], then dkw and dk [64, K] in the same accumulators. A^T is upper triangular, dM lower: a warp that has little
// of the one has much of the other. dr is rounded to E as the left operand of dM, W as that of dk; the row sums take
// the accumulators themselves. W goes through shared memory, since dk takes its columns too.
//
// Shared memory, 75 KB, three blocks an SM: k; v, then dv, then W; du, then dw; v_new, then dqkwg's dk and the sum:
// [64, 128]; A: [64, 64]; all 16-bit, swizzled (tile.cuh). Gates, step sizes and sums 2.1 KB. dw and dk are fetched
// while the block computes from the other tiles.
//
// Summation order: A^T du and A^T dw over tokens ascending from the row's own block on; dM over V and k k^T over K
// ascending; dk: beta e dkw, then W k over tokens ascending, then W^T k ascending, then dqkwg's part; row sums over a
// lane's columns ascending, then its four lanes; column sums over the two rows of a lane, then eight lanes, then the
// warps ascending.
#include "cuda/chain.hpp"
#include "cuda/programs.hpp"
#include "cuda/tile/pairs.cuh"
#include "cuda/tile/transfer.cuh"
#include "cuda/tile/wy.cuh"

namespace cake_gdn::cuda {

namespace {

constexpr int kThreads = 128;

struct Smem {
    alignas(256) char k[Tile<kD>::bytes(C)];
    alignas(256) char v[Tile<kD>::bytes(C)];      // then dv, a warp its own rows; then W
    alignas(256) char du[Tile<kD>::bytes(C)];     // then dw
    alignas(256) char v_new[Tile<kD>::bytes(C)];  // then dk
    alignas(256) char a[Tile<C>::bytes(C)];
    float cum[C], step[C];
    float dstep[C], row_sums[C];  // without its share of dkw; of P
    float column_sums[4][C];      // of beta P over a warp's rows
    uint8_t reset[C];
    Chunk chunk;  // read again where it is needed again: cheaper than registers, and than what would be kept of it
};
static_assert(Tile<C>::bytes(C) <= Tile<kD>::bytes(C), "W takes v's place");

// Sum over the eight lanes that share a column of an accumulator tile, the same bits in each of them.
__device__ __forceinline__ float sum_column_lanes(float value) {
    value += __shfl_xor_sync(0xffffffffu, value, 4);
    value += __shfl_xor_sync(0xffffffffu, value, 8);
    value += __shfl_xor_sync(0xffffffffu, value, 16);
    return value;
}

template <class E>
__global__ void __launch_bounds__(kThreads, 3) wy_backward(const __grid_constant__ cake_gdn_wy_backward_params p) {
    extern __shared__ __align__(256) char memory[];
    Smem &s = *reinterpret_cast<Smem *>(memory);
    const auto [head, hv, hk] = block_heads(p);
    const Chunk c = block_chunk(p);
    if (c.sequence < 0) return;
    const int K = static_cast<int>(p.K), V = static_cast<int>(p.V), Kw = CAKE_GDN_WIDTH(K), Vw = CAKE_GDN_WIDTH(V);
    const Tile<kD> k{ptx::shared_address(s.k)}, v{ptx::shared_address(s.v)}, du{ptx::shared_address(s.du)},
        dw = du, v_new{ptx::shared_address(s.v_new)}, dk = v_new;
    const Tile<C> a{ptx::shared_address(s.a)}, W{ptx::shared_address(s.v)};
    const int64_t k_stride = p.heads * Kw, v_stride = p.stored_heads * Vw;

    const Rows k_rows = CAKE_GDN_ROWS_OF(p, k), v_rows = CAKE_GDN_ROWS_OF(p, v);
    const int64_t a_row = c.row * p.HV + hv;
    copy_rows<kThreads, C>(a, static_cast<const E *>(p.A) + a_row * C, p.HV * C, c.length, C);
    copy_rows<kThreads, C>(du, stored_at(static_cast<const E *>(p.du), p, c, hv, Vw), v_stride, c.length, V);
    ptx::commit_copies();
    copy_rows<kThreads, C>(v, rows_at<E>(v_rows, c, hv), v_rows.token, c.length, V);
    copy_rows<kThreads, C>(v_new, stored_at(static_cast<const E *>(p.v_new), p, c, hv, Vw), v_stride, c.length, V);
    copy_rows<kThreads, C>(k, rows_at<E>(k_rows, c, hk), k_rows.token, c.length, K);
    ptx::commit_copies();
    const Gates gates{s.cum, s.reset};
    load_gates(gates, p, c, hv);
    load_scalars(s.step, p.step, p, c, hv);
    if (threadIdx.x == 0) s.chunk = c;

    const int warp = warp_index(), m0 = 16 * warp;
    const int lane = threadIdx.x % 32, row = m0 + lane / 4, column = 2 * (lane % 4);  // rows `row` and `row` + 8
    ptx::wait_copies<1>();
    __syncthreads();
    const float step[2] = {s.step[row], s.step[row + 8]};
    uint32_t W_pairs[8][2];  // accumulator t's at [t]
    {
        uint32_t left[8][4];  // E(dr)
        {
            float dr[1][16][4] = {};
            warp_gemm<E, true, true>(dr, a, m0, du, 0, m0, C);
            ptx::wait_copies<0>();
            __syncthreads();
            copy_rows<kThreads, C>(dw, slice_at(static_cast<const E *>(p.dw), p, s.chunk, head, Kw), k_stride,
                                   s.chunk.length, K);
            ptx::commit_copies();
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t bits[16];
                const PairRow pairs(v, row + 8 * half);
                pairs.load(bits);
                const float dot = sum_row_lanes(lane_dot<E>(dr[0], half, bits));
                if (lane % 4 == 0) s.dstep[row + 8 * half] = dot;
#pragma unroll
                for (int t = 0; t < 16; ++t) {
                    pairs.store(t, ptx::pack<E>(masked(dr[0][t][2 * half], step[half]),
                                                masked(dr[0][t][2 * half + 1], step[half])));
                }
            }
            pack_operand<E, 8>(left, dr[0]);
        }
        if (p.dv != nullptr) {
            E *const out = static_cast<E *>(p.dv) + s.chunk.b * p.dv_batch + s.chunk.t * p.dv_token + hv * p.dv_head;
            store_own_rows(v, m0, out, p.dv_token, p.dv_column, s.chunk.length, V);
        }
        const GateRow g[2] = {{gates, row, c.length}, {gates, row + 8, c.length}};
        float sums[2] = {};
#pragma unroll
        for (int t = 0; t < 8; ++t) W_pairs[t][0] = W_pairs[t][1] = 0;
#pragma unroll
        for (int block = 0; block < 4; block += 2) {  // two blocks at a time, the second one may lie above the diagonal
            if (block > warp) break;
            float dm[4][4] = {}, kk[1][4][4] = {};
            warp_gemm_registers<E, false>(dm, left, v_new, 16 * block);
            warp_gemm<E, false, false>(kk, k, m0, k, 16 * block, 0, kD);
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                const int j = 16 * block + 8 * t + column;
                const float2 cum = *reinterpret_cast<const float2 *>(s.cum + j);
                float below[2] = {};  // column sums of beta P over the lane's two rows
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float x0 = masked(-dm[t][2 * half], g[half].decay(j, cum.x));
                    const float x1 = masked(-dm[t][2 * half + 1], g[half].decay(j + 1, cum.y));
                    const float p0 = x0 * kk[0][t][2 * half], p1 = x1 * kk[0][t][2 * half + 1];
                    sums[half] += p0;
                    sums[half] += p1;
                    below[0] = fmaf(step[half], p0, below[0]);
                    below[1] = fmaf(step[half], p1, below[1]);
                    W_pairs[2 * block + t][half] = ptx::pack<E>(step[half] * x0, step[half] * x1);
                }
                below[0] = sum_column_lanes(below[0]);
                below[1] = sum_column_lanes(below[1]);
                if (lane < 4) *reinterpret_cast<float2 *>(&s.column_sums[warp][j]) = make_float2(below[0], below[1]);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sum = sum_row_lanes(sums[half]);
            if (lane % 4 == 0) s.row_sums[row + 8 * half] = sum;
        }
    }
    __syncthreads();  // nobody needs v or v_new any more
    copy_rows<kThreads, C>(dk, slice_at(static_cast<const E *>(p.dk), p, s.chunk, head, Kw), k_stride, s.chunk.length,
                           K);
    ptx::commit_copies();
#pragma unroll
    for (int t = 0; t < 8; ++t) {
        W.store_pair(row, 8 * t + column, W_pairs[t][0]);
        W.store_pair(row + 8, 8 * t + column, W_pairs[t][1]);
    }
    ptx::wait_copies<1>();
    __syncthreads();

    float acc[1][16][4] = {};
    warp_gemm<E, true, true>(acc, a, m0, dw, 0, m0, C);
    float dots[2];  // e dkw.k
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float start = gates.from_start(row + 8 * half), weight = masked(start, s.step[row + 8 * half]);
        uint32_t bits[16];
        PairRow(k, row + 8 * half).load(bits);
        dots[half] = masked(sum_row_lanes(lane_dot<E>(acc[0], half, bits)), start);
#pragma unroll
        for (int t = 0; t < 16; ++t) {
            acc[0][t][2 * half] = masked(acc[0][t][2 * half], weight);
            acc[0][t][2 * half + 1] = masked(acc[0][t][2 * half + 1], weight);
        }
    }
    warp_gemm<E, false, true>(acc, W, m0, k, 0, 0, m0 + 16);
    warp_gemm<E, true, true>(acc, W, m0, k, 0, m0, C);
    ptx::wait_copies<0>();
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint32_t bits[16];
        const PairRow pairs(dk, row + 8 * half);
        pairs.load(bits);
#pragma unroll
        for (int t = 0; t < 16; ++t) {
            const float2 part = ptx::unpack<E>(bits[t]);
            pairs.store(t, ptx::pack<E>(acc[0][t][2 * half] + part.x, acc[0][t][2 * half + 1] + part.y));
        }
    }
    store_own_rows(dk, m0, slice_at(static_cast<E *>(p.dk), p, s.chunk, head, Kw), k_stride, 1, s.chunk.length, Kw);

    if (lane % 4 == 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = row + 8 * half;
            if (i >= s.chunk.length) continue;
            const float sum = dots[half] + s.row_sums[i];
            float below = s.column_sums[warp][i];
            for (int later = warp + 1; later < 4; ++later) below += s.column_sums[later][i];
            const int64_t to = hv * (p.B * p.T) + s.chunk.row + i;
            p.dstep[to] = s.dstep[i] + sum;
            p.dcum[to] += s.step[i] * sum - below;
        }
    }
}

}  // namespace

void run_wy_backward(const cake_gdn_wy_backward_params &p, void *stream) {
    run_chunks("wy_backward", p, sizeof(Smem), kThreads, stream, wy_backward<ptx::bf16>, wy_backward<ptx::fp16>);
}

}  // namespace cake_gdn::cuda
