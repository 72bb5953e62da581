// adjoint_scan: the gradient of the state against the order of the chunks, and the gradient of the corrected values.
// dh is the gradient of the state after the chunk:
//
//     du_j = dv_local_j + d_j (k_j dh)          d_j = exp(g_last - g_j), 0 if a reset lies after j
//     dh <- e_last dh + sum_i q_i (scale e_i do_i)^T - sum_j w_j du_j^T
//                                               e_i = exp(g_i), 0 if a reset lies at or before i
//
// Tile map. As fwd_scan: one block a (sequence, value head, BV columns of V), BV / 16 computing warps that hold dh^T
// [16 columns, 128] each in fp32 registers and never talk to one another (tile/state.cuh):
//     (k dh)^T [16, 64]  = E(dh^T) k^T                left operand: the state, packed in registers; right: k's tile
//     dh^T [16, 128]    += E(scale e do)^T q          left operand: do, scaled on the way into registers
//                       += E(-du)^T w                 left operand: du, packed in registers
// Two more warps keep tiles moving: cp.async of q, k, w, do, dv_local kStages - 1 chunks ahead, gates through
// registers, and the stores of E(dh) and du of the chunk before. One barrier a chunk.
// BV is chosen as in fwd_scan; the bits of a column do not depend on it.
//
// Shared memory: kStages x (q, k, w [64, 128] and do, dv [64, BV], 16-bit, swizzled, du written over dv; d and scale e
// [64], e_last), and two tiles [128, BV] of E(dh) on their way out: BV = 32: 186 KB, BV = 64: 226 KB.
//
// Roundings and summation order. k dh over K ascending, 16 at a time inside the tensor core, in one fp32 accumulator;
// du = E(fma(d, that, dv_local)). e_last dh in fp32, then into the same accumulators the q part, tokens ascending, then
// the w part, tokens ascending. Negation is exact.
#include "cuda/chain.hpp"
#include "cuda/programs.hpp"
#include "cuda/tile/state.cuh"

namespace cake_gdn::cuda {

namespace {

constexpr int kStages = 3;

template <int BV>
struct Stage {
    alignas(128) char q[Tile<kStateRows>::bytes(C)], k[Tile<kStateRows>::bytes(C)], w[Tile<kStateRows>::bytes(C)];
    alignas(128) char d_o[Tile<BV>::bytes(C)], dv[Tile<BV>::bytes(C)];
    float to_end[C], from_start[C];  // the latter times scale
    float keep;
};

template <int BV>
struct Smem {
    Stage<BV> stages[kStages];
    alignas(128) char dh[2][Tile<BV>::bytes(kStateRows)];
};

template <class E, int BV>
__global__ void __launch_bounds__(kScanThreads<BV>, 1)
    adjoint_scan(const __grid_constant__ cake_gdn_adjoint_scan_params p) {
    extern __shared__ __align__(128) char memory[];
    Smem<BV> &smem = *reinterpret_cast<Smem<BV> *>(memory);
    const int K = static_cast<int>(p.K), V = static_cast<int>(p.V), Kw = CAKE_GDN_WIDTH(K), Vw = CAKE_GDN_WIDTH(V);
    const ScanBlock block = scan_block(p, BV);
    const int v0 = block.column;
    const int64_t n = block.sequence, head = block.head, hv = p.head_begin + head, hk = hv / (p.HV / p.H);
    const ChunkRange range = sequence_range(p, n);
    const auto chunk = [&](int64_t i) { return range.at(range.count - 1 - i); };  // of step i

    constexpr int kComputing = BV / kWarpColumns * 32;  // threads
    if (threadIdx.x < kComputing) {
        const int m0 = threadIdx.x / 32 * kWarpColumns;  // the warp's first column in the block
        const StateView dht = CAKE_GDN_STATE_OF(p, dht), dh0 = CAKE_GDN_STATE_OF(p, dh0);
        State state;
        load_state(state, dht, n, hv, K, V, v0 + m0);
        const auto compute = [&](int64_t i, int stage) {
            const Stage<BV> &s = smem.stages[stage];
            const Tile<kStateRows> q{ptx::shared_address(s.q)}, k{ptx::shared_address(s.k)},
                w{ptx::shared_address(s.w)};
            const Tile<BV> d_o{ptx::shared_address(s.d_o)}, dv{ptx::shared_address(s.dv)},
                dh{ptx::shared_address(smem.dh[i % 2])};
            uint32_t operand[8][4];
            pack_operand<E, 8>(operand, state);
            decay_state(state, s.keep);
#pragma unroll
            for (int step = 0; step < 8; ++step) store_a_transposed(dh, operand[step], m0, 16 * step);
            float kdh[8][4] = {};
            warp_gemm_registers<E, false>(kdh, operand, k, 0);

            uint32_t update[4][4];
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                d_o.template load_a<true>(update[step], m0, 16 * step);
                for_token_pairs<E>(update[step], step, [&](float2 x, int j, int) {
                    const float2 e = *reinterpret_cast<const float2 *>(s.from_start + j);
                    return ptx::pack<E>(masked(x.x, e.x), masked(x.y, e.y));
                });
            }
            warp_gemm_registers<E, true>(state, update, q, 0);
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                dv.template load_a<true>(update[step], m0, 16 * step);
                for_token_pairs<E>(update[step], step, [&](float2 x, int j, int r) {
                    const float2 d = *reinterpret_cast<const float2 *>(s.to_end + j);
                    const float (&acc)[4] = kdh[2 * step + r / 2];
                    return ptx::pack<E>(d.x == 0.0f ? x.x : fmaf(d.x, acc[r % 2 * 2], x.x),
                                        d.y == 0.0f ? x.y : fmaf(d.y, acc[r % 2 * 2 + 1], x.y));
                });
                store_a_transposed(dv, update[step], m0, 16 * step);
#pragma unroll
                for (int r = 0; r < 4; ++r) update[step][r] ^= 0x80008000u;
            }
            warp_gemm_registers<E, true>(state, update, w, 0);
        };
        compute_steps<kStages, kScanThreads<BV>>(range.count, compute);
        store_state(state, dh0, n, hv, K, V, v0 + m0);
        return;
    }
    const int mover = static_cast<int>(threadIdx.x) - kComputing;
    const Rows q_rows = CAKE_GDN_ROWS_OF(p, q), k_rows = CAKE_GDN_ROWS_OF(p, k), do_rows = CAKE_GDN_ROWS_OF(p, d_o);
    TokenGates gates = {};  // of the chunk filled last
    const auto fill = [&](int64_t i, int stage) {
        if (i > 0 && i <= range.count) {
            Stage<BV> &s = smem.stages[stage == 0 ? kStages - 1 : stage - 1];
            s.to_end[mover] = gates.to_end(mover);
            s.from_start[mover] = p.scale * gates.from_start();
            if (mover == 0) s.keep = gates.keep();
        }
        if (i >= range.count) return;
        const Chunk c = chunk(i);
        gates = load_token_gates(p, c, hv, mover);
        Stage<BV> &s = smem.stages[stage];
        const auto wide = [&](char *tile, const E *from, int64_t stride) {
            copy_columns(Tile<kStateRows>{ptx::shared_address(tile)}, from, stride, c.length, K, mover);
        };
        wide(s.k, rows_at<E>(k_rows, c, hk), k_rows.token);
        wide(s.q, rows_at<E>(q_rows, c, hk), q_rows.token);
        wide(s.w, slice_at(static_cast<const E *>(p.w), p, c, head, Kw), p.heads * Kw);
        copy_columns(Tile<BV>{ptx::shared_address(s.d_o)}, rows_at<E>(do_rows, c, hv) + v0, do_rows.token,
                     do_rows.data == nullptr ? 0 : c.length, V - v0, mover);
        copy_columns(Tile<BV>{ptx::shared_address(s.dv)}, slice_at(static_cast<const E *>(p.dv), p, c, head, Vw) + v0,
                     p.heads * Vw, c.length, V - v0, mover);
    };
    const auto drain = [&](int64_t i, int stage) {
        const Chunk c = chunk(i);
        if (!c.last) {
            E *dh = static_cast<E *>(p.dh) + (next_slot(c) * p.heads + head) * p.K * Vw + v0;
            store_columns<E, kStateRows>(Tile<BV>{ptx::shared_address(smem.dh[i % 2])}, dh, Vw, K, Vw - v0, mover);
        }
        store_columns<E, C>(Tile<BV>{ptx::shared_address(smem.stages[stage].dv)},
                            slice_at(static_cast<E *>(p.dv), p, c, head, Vw) + v0, p.heads * Vw, c.length, Vw - v0,
                            mover);
    };
    move_steps<kStages, kScanThreads<BV>>(range.count, fill, drain);
}

template <int BV>
void run(const cake_gdn_adjoint_scan_params &p, void *stream) {
    run_blocks("adjoint_scan", p, scan_blocks(p, BV), sizeof(Smem<BV>), kScanThreads<BV>, stream,
               adjoint_scan<ptx::bf16, BV>, adjoint_scan<ptx::fp16, BV>);
}

}  // namespace

void run_adjoint_scan(const cake_gdn_adjoint_scan_params &p, void *stream) {
    scan_columns(p, traits(p.device).multiprocessors) == 32 ? run<32>(p, stream) : run<64>(p, stream);
}

}  // namespace cake_gdn::cuda
