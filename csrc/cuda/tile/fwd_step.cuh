// One chunk of the forward scan, as fwd_scan and fwd_prescan take it: equations, roundings and summation order are in
// fwd_scan.cu.
#pragma once

#include "cuda/tile/state.cuh"

namespace cake_gdn::cuda {

// A chunk's tiles and factors in shared memory.
template <int BV>
struct FwdStage {
    alignas(128) char w[Tile<kStateRows>::bytes(C)], k[Tile<kStateRows>::bytes(C)], u[Tile<BV>::bytes(C)];
    float to_end[C];
    float keep;
};

// The movers' part: starts the copies of chunk c; `values` = false: u is zero.
template <class E, int BV, class Params>
__device__ __forceinline__ void copy_fwd_stage(FwdStage<BV> &s, const Params &p, const Rows &k_rows, const Chunk &c,
                                               int64_t head, int64_t hk, int v0, bool values, int mover) {
    const int K = static_cast<int>(p.K), V = static_cast<int>(p.V), Kw = CAKE_GDN_WIDTH(K), Vw = CAKE_GDN_WIDTH(V);
    copy_columns(Tile<kStateRows>{ptx::shared_address(s.w)}, slice_at(static_cast<const E *>(p.w), p, c, head, Kw),
                 p.heads * Kw, c.length, K, mover);
    copy_columns(Tile<kStateRows>{ptx::shared_address(s.k)}, rows_at<E>(k_rows, c, hk), k_rows.token, c.length, K,
                 mover);
    copy_columns(Tile<BV>{ptx::shared_address(s.u)}, slice_at(static_cast<const E *>(p.u), p, c, head, Vw) + v0,
                 p.heads * Vw, values ? c.length : 0, V - v0, mover);
}
template <int BV>
__device__ __forceinline__ void publish_gates(FwdStage<BV> &s, const TokenGates &gates, int mover) {
    s.to_end[mover] = gates.to_end(mover);
    if (mover == 0) s.keep = gates.keep();
}

// A computing warp's part: its columns m0.. of the state through the chunk. keep_state(E(state), packed) and
// keep_values(the step's part of v_new, step) store what a scan keeps.
template <class E, int BV, class KeepState, class KeepValues>
__device__ __forceinline__ void fwd_step(State &state, const FwdStage<BV> &s, int m0, KeepState &&keep_state,
                                         KeepValues &&keep_values) {
    const Tile<kStateRows> w{ptx::shared_address(s.w)}, k{ptx::shared_address(s.k)};
    const Tile<BV> u{ptx::shared_address(s.u)};
    uint32_t operand[8][4];
    pack_operand<E, 8>(operand, state);
    decay_state(state, s.keep);
    keep_state(operand);
    float wh[8][4] = {};
    warp_gemm_registers<E, false>(wh, operand, w, 0);
    uint32_t update[4][4];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        uint32_t v[4];
        u.template load_a<true>(v, m0, 16 * step);
        for_token_pairs<E>(v, step, [&](float2 x, int, int r) {
            const float (&acc)[4] = wh[2 * step + r / 2];
            return ptx::pack<E>(x.x - acc[r % 2 * 2], x.y - acc[r % 2 * 2 + 1]);
        });
        keep_values(v, step);
#pragma unroll
        for (int r = 0; r < 4; ++r) update[step][r] = v[r];
        for_token_pairs<E>(update[step], step, [&](float2 x, int j, int) {
            const float2 d = *reinterpret_cast<const float2 *>(s.to_end + j);
            return ptx::pack<E>(masked(x.x, d.x), masked(x.y, d.y));
        });
    }
    warp_gemm_registers<E, true>(state, update, k, 0);
}

}  // namespace cake_gdn::cuda
