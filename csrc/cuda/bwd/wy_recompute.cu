// wy_recompute: w and v_new once more, from the saved inverse and the saved states, for the backward: the forward's
// bits.
//
//     w = A (beta e k),   u = A (beta v),   v_new = u - w h
//
// Tile map. One block of four warps a (chunk, value head), value heads of a chunk next to each other so that k comes
// from L2. Warp i computes columns 32 i..32 i + 31 of everything, w and u over the columns of k and v that they come
// from (apply_lower, which wy uses too). w h is transposed, [V, 64] = h^T w^T, as fwd_scan has it: each product, each
// rounding and each sum is one of the forward's. Without h, u is what is written, and fwd_scan goes on from there.
// K and V are padded to 128 by zeros in shared memory.
//
// Shared memory: k, then w; v, then u, then v_new: [64, 128]; A [64, 64]; with h: h [128, 128]; 16-bit, swizzled
// (tile.cuh); gates and factors 0.8 KB. 73 KB, three blocks an SM; 41 KB without h.
//
// Summation order: w and u over tokens ascending; w h over K ascending, 16 at a time inside the tensor core, in one
// fp32 accumulator; v_new = E(u - that).
#include <cstddef>

#include "cuda/chain.hpp"
#include "cuda/programs.hpp"
#include "cuda/tile/state.cuh"
#include "cuda/tile/transfer.cuh"
#include "cuda/tile/wy.cuh"

namespace cake_gdn::cuda {

namespace {

constexpr int kThreads = 128;

struct Smem {
    alignas(128) char k[Tile<kD>::bytes(C)], v[Tile<kD>::bytes(C)], a[Tile<C>::bytes(C)];
    float cum[C], step[C], weight[C];  // weight: beta e
    float growth[4];                   // each warp's tokens' (warp_growth)
    uint8_t reset[C];
    alignas(128) char h[Tile<kD>::bytes(kD)];  // last: absent without h
};

template <class E>
__global__ void __launch_bounds__(kThreads, 3) wy_recompute(const __grid_constant__ cake_gdn_wy_recompute_params p) {
    extern __shared__ __align__(128) char memory[];
    Smem &s = *reinterpret_cast<Smem *>(memory);
    const auto [head, hv, hk] = block_heads(p);
    const Chunk c = block_chunk(p);
    if (c.sequence < 0) return;
    const int K = static_cast<int>(p.K), V = static_cast<int>(p.V), Kw = CAKE_GDN_WIDTH(K), Vw = CAKE_GDN_WIDTH(V);
    const Tile<kD> k{ptx::shared_address(s.k)}, v{ptx::shared_address(s.v)}, h{ptx::shared_address(s.h)};
    const Tile<C> a{ptx::shared_address(s.a)};
    const bool correct = p.h != nullptr;

    const Rows k_rows = CAKE_GDN_ROWS_OF(p, k), v_rows = CAKE_GDN_ROWS_OF(p, v);
    const int64_t a_row = c.row * p.HV + hv;
    copy_rows<kThreads, C>(a, static_cast<const E *>(p.A) + a_row * C, p.HV * C, c.length, C);
    copy_rows<kThreads, C>(k, rows_at<E>(k_rows, c, hk), k_rows.token, c.length, K);
    copy_rows<kThreads, C>(v, rows_at<E>(v_rows, c, hv), v_rows.token, c.length, V);
    ptx::commit_copies();
    if (correct && !c.first) {
        copy_rows<kThreads, kD>(h, static_cast<const E *>(p.h) + (c.slot * p.HV + hv) * p.K * Vw, Vw, K, V);
    }
    ptx::commit_copies();
    const Gates gates{s.cum, s.reset};
    load_gates(gates, p, c, hv);
    load_scalars(s.step, p.step, p, c, hv);
    if (threadIdx.x < C) s.weight[threadIdx.x] = masked(gates.from_start(threadIdx.x), s.step[threadIdx.x]);
    if (correct && c.first) {
        load_user_state<E>(h, CAKE_GDN_STATE_OF(p, initial_state), c.sequence, hv, K, V, 0, kThreads);
    }

    const int n0 = 32 * warp_index();
    ptx::wait_copies<1>();
    __syncthreads();
    if (p.bound != nullptr) {
        s.growth[warp_index()] = warp_growth<E>(k, s.step);
        __syncthreads();  // before a warp writes over its columns of k
        if (threadIdx.x == 0) {
            p.bound[head * p.max_chunks + blockIdx.x / static_cast<uint32_t>(p.heads)] =
                chunk_bound(gates, s.growth, c.length);
        }
    }
    apply_lower<E>(a, k, n0, s.weight);
    apply_lower<E>(a, v, n0, s.step);
    ptx::wait_copies<0>();
    __syncthreads();
    if (correct) {
        float acc[2][8][4] = {};  // (w h)^T, rows n0..n0 + 31
        warp_gemm<E, true, false>(acc, h, n0, k, 0, 0, kD);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                uint32_t u[4];
                v.template load_a<true>(u, n0 + 16 * i, 16 * step);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float (&wh)[4] = acc[i][2 * step + e / 2];
                    const float2 x = ptx::unpack<E>(u[e]);
                    u[e] = ptx::pack<E>(x.x - wh[e % 2 * 2], x.y - wh[e % 2 * 2 + 1]);
                }
                __syncwarp();  // every lane's part of u has been read
                store_a_transposed(v, u, n0 + 16 * i, 16 * step);
            }
        }
        __syncthreads();
    }
    store_tile<kThreads, C>(k, slice_at(static_cast<E *>(p.w), p, c, head, Kw), p.heads * Kw, c.length, Kw);
    store_tile<kThreads, C>(v, slice_at(static_cast<E *>(p.v_new), p, c, head, Vw), p.heads * Vw, c.length, Vw);
}

}  // namespace

void run_wy_recompute(const cake_gdn_wy_recompute_params &p, void *stream) {
    run_chunks("wy_recompute", p, p.h ? sizeof(Smem) : offsetof(Smem, h), kThreads, stream, wy_recompute<ptx::bf16>,
               wy_recompute<ptx::fp16>);
}

}  // namespace cake_gdn::cuda
