// One chunk of the adjoint scan, as adjoint_scan and adjoint_prescan take it: equations, roundings and summation order are
// in adjoint_scan.cu.
#pragma once

#include "cuda/tile/state.cuh"

namespace cake_gdn::cuda {

// A chunk's tiles and factors in shared memory.
template <int BV>
struct AdjointStage {
    alignas(128) char q[Tile<kStateRows>::bytes(C)], k[Tile<kStateRows>::bytes(C)], w[Tile<kStateRows>::bytes(C)];
    alignas(128) char d_o[Tile<BV>::bytes(C)], dv[Tile<BV>::bytes(C)];
    float to_end[C], from_start[C];  // the latter times scale
    float keep;
};

struct AdjointRows {
    Rows q, k, d_o;
};
#define CAKE_GDN_ADJOINT_ROWS_OF(p) \
    ::cake_gdn::cuda::AdjointRows { CAKE_GDN_ROWS_OF(p, q), CAKE_GDN_ROWS_OF(p, k), CAKE_GDN_ROWS_OF(p, d_o) }

// The movers' part: starts the copies of chunk c; `values` = false: do and dv are zero, and q is not needed.
template <class E, int BV, class Params>
__device__ __forceinline__ void copy_adjoint_stage(AdjointStage<BV> &s, const Params &p, const AdjointRows &rows,
                                                   const Chunk &c, int64_t head, int64_t hv, int64_t hk, int v0,
                                                   bool values, int mover) {
    const int K = static_cast<int>(p.K), V = static_cast<int>(p.V), Kw = CAKE_GDN_WIDTH(K), Vw = CAKE_GDN_WIDTH(V);
    const auto wide = [&](char *tile, const E *from, int64_t stride) {
        copy_columns(Tile<kStateRows>{ptx::shared_address(tile)}, from, stride, c.length, K, mover);
    };
    wide(s.k, rows_at<E>(rows.k, c, hk), rows.k.token);
    if (values) wide(s.q, rows_at<E>(rows.q, c, hk), rows.q.token);
    wide(s.w, slice_at(static_cast<const E *>(p.w), p, c, head, Kw), p.heads * Kw);
    copy_columns(Tile<BV>{ptx::shared_address(s.d_o)}, rows_at<E>(rows.d_o, c, hv) + v0, rows.d_o.token,
                 values && rows.d_o.data != nullptr ? c.length : 0, V - v0, mover);
    copy_columns(Tile<BV>{ptx::shared_address(s.dv)}, slice_at(static_cast<const E *>(p.dv), p, c, head, Vw) + v0,
                 p.heads * Vw, values ? c.length : 0, V - v0, mover);
}
template <int BV>
__device__ __forceinline__ void publish_gates(AdjointStage<BV> &s, const TokenGates &gates, float scale, int mover) {
    s.to_end[mover] = gates.to_end(mover);
    s.from_start[mover] = scale * gates.from_start();
    if (mover == 0) s.keep = gates.keep();
}

// A computing warp's part: its columns m0.. of the state's gradient against the chunk. keep_state(E(dh), packed) and
// keep_values(the step's part of du, step) store what a scan keeps; `values` as above.
template <class E, int BV, class KeepState, class KeepValues>
__device__ __forceinline__ void adjoint_step(State &state, const AdjointStage<BV> &s, int m0, bool values,
                                             KeepState &&keep_state, KeepValues &&keep_values) {
    const Tile<kStateRows> q{ptx::shared_address(s.q)}, k{ptx::shared_address(s.k)}, w{ptx::shared_address(s.w)};
    const Tile<BV> d_o{ptx::shared_address(s.d_o)}, dv{ptx::shared_address(s.dv)};
    uint32_t operand[8][4];
    pack_operand<E, 8>(operand, state);
    decay_state(state, s.keep);
    keep_state(operand);
    float kdh[8][4] = {};
    warp_gemm_registers<E, false>(kdh, operand, k, 0);

    uint32_t update[4][4];
    if (values) {
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            d_o.template load_a<true>(update[step], m0, 16 * step);
            for_token_pairs<E>(update[step], step, [&](float2 x, int j, int) {
                const float2 e = *reinterpret_cast<const float2 *>(s.from_start + j);
                return ptx::pack<E>(masked(x.x, e.x), masked(x.y, e.y));
            });
        }
        warp_gemm_registers<E, true>(state, update, q, 0);
    }
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        dv.template load_a<true>(update[step], m0, 16 * step);
        for_token_pairs<E>(update[step], step, [&](float2 x, int j, int r) {
            const float2 d = *reinterpret_cast<const float2 *>(s.to_end + j);
            const float (&acc)[4] = kdh[2 * step + r / 2];
            return ptx::pack<E>(d.x == 0.0f ? x.x : fmaf(d.x, acc[r % 2 * 2], x.x),
                                d.y == 0.0f ? x.y : fmaf(d.y, acc[r % 2 * 2 + 1], x.y));
        });
        keep_values(update[step], step);
#pragma unroll
        for (int r = 0; r < 4; ++r) update[step][r] ^= 0x80008000u;
    }
    warp_gemm_registers<E, true>(state, update, w, 0);
}

}  // namespace cake_gdn::cuda
