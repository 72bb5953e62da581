// adjoint_scan: the gradient of the state against the order of the chunks, and the gradient of the corrected values.
// dh is the gradient of the state after the chunk:
//
//     du_j = dv_local_j + d_j (k_j dh)          d_j = exp(g_last - g_j), 0 if a reset lies after j
//     dh <- e_last dh + sum_i q_i (scale e_i do_i)^T - sum_j w_j du_j^T
//                                               e_i = exp(g_i), 0 if a reset lies at or before i
//
// A sequence's last segment starts from dht, an earlier one from the gradient at the seam after it (stitch); the first one
// writes dh0.
//
// Tile map. As fwd_scan: one block a (segment, value head, BV columns of V), BV / 16 computing warps that hold dh^T
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
#include "cuda/tile/adjoint_step.cuh"
#include "cuda/tile/segment.cuh"

namespace cake_gdn::cuda {

namespace {

constexpr int kStages = 3;

template <int BV>
struct Smem {
    AdjointStage<BV> stages[kStages];
    alignas(128) char dh[2][Tile<BV>::bytes(kStateRows)];
};

template <class E, int BV>
__global__ void __launch_bounds__(kScanThreads<BV>, 1)
    adjoint_scan(const __grid_constant__ cake_gdn_adjoint_scan_params p) {
    extern __shared__ __align__(128) char memory[];
    Smem<BV> &smem = *reinterpret_cast<Smem<BV> *>(memory);
    const int K = static_cast<int>(p.K), V = static_cast<int>(p.V), Vw = CAKE_GDN_WIDTH(V);
    const ScanBlock block = scan_block(p, blocks_of(V, BV));
    const Segment segment = block.segment;
    if (segment.sequence < 0) return;
    const int v0 = block.column_block * BV;
    const int64_t head = block.head, hv = p.head_begin + head, hk = hv / (p.HV / p.H);
    const ChunkRange range = chunk_range(p, segment.chunk, segment.chunk + segment.chunks);
    const auto chunk = [&](int64_t i) { return range.at(range.count - 1 - i); };  // of step i

    constexpr int kComputing = BV / kWarpColumns * 32;  // threads
    if (threadIdx.x < kComputing) {
        const int m0 = threadIdx.x / 32 * kWarpColumns;  // the warp's first column in the block
        State state;
        load_start(state, p, CAKE_GDN_STATE_OF(p, dht), segment.last, segment, segment.seam_after(), head, v0 + m0);
        const auto compute = [&](int64_t i, int stage) {
            const Tile<BV> dv{ptx::shared_address(smem.stages[stage].dv)}, dh{ptx::shared_address(smem.dh[i % 2])};
            adjoint_step<E>(
                state, smem.stages[stage], m0, true,
                [&](const uint32_t (&operand)[8][4]) {
#pragma unroll
                    for (int step = 0; step < 8; ++step) store_a_transposed(dh, operand[step], m0, 16 * step);
                },
                [&](const uint32_t (&du)[4], int step) { store_a_transposed(dv, du, m0, 16 * step); });
        };
        compute_steps<kStages, kScanThreads<BV>>(range.count, compute);
        if (segment.first) store_state(state, CAKE_GDN_STATE_OF(p, dh0), segment.sequence, hv, K, V, v0 + m0);
        return;
    }
    const int mover = static_cast<int>(threadIdx.x) - kComputing;
    const AdjointRows rows = CAKE_GDN_ADJOINT_ROWS_OF(p);
    TokenGates gates = {};  // of the chunk filled last
    const auto fill = [&](int64_t i, int stage) {
        if (i > 0 && i <= range.count) {
            publish_gates(smem.stages[stage == 0 ? kStages - 1 : stage - 1], gates, p.scale, mover);
        }
        if (i >= range.count) return;
        const Chunk c = chunk(i);
        gates = load_token_gates(p, c, hv, mover);
        copy_adjoint_stage<E>(smem.stages[stage], p, rows, c, head, hv, hk, v0, true, mover);
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
    run_blocks("adjoint_scan", p, segment_blocks(p, blocks_of(p.V, BV)), sizeof(Smem<BV>), kScanThreads<BV>, stream,
               adjoint_scan<ptx::bf16, BV>, adjoint_scan<ptx::fp16, BV>);
}

}  // namespace

void run_adjoint_scan(const cake_gdn_adjoint_scan_params &p, void *stream) {
    check_segments("adjoint_scan", p);
    scan_columns(p, traits(p.device).multiprocessors) == 32 ? run<32>(p, stream) : run<64>(p, stream);
}

}  // namespace cake_gdn::cuda
