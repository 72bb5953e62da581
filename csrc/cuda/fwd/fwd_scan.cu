// fwd_scan: the state through the chunks of a segment, and the corrected values.
//
//     v_new_j = u_j - w_j h          d_j = exp(g_last - g_j), 0 if a reset lies after j
//     h <- e_last h + sum_j k_j (d_j v_new_j)^T      e_last = exp(g_last), 0 if the chunk has a reset
//
// A sequence's first segment starts from the initial state, a later one from the state at the seam before it (stitch);
// the last one writes the final state. The state at a seam enters exactly as an initial state does.
//
// Tile map. One block a (segment, value head, BV columns of V), walking over the segment's chunks; blocks of one head
// next to each other, so that w and k come from L2. BV / 16 warps compute. Each holds h^T [16 columns, 128] in fp32
// registers and never talks to another (tile/state.cuh): with everything transposed,
//     (w h)^T [16, 64] = E(h^T) w^T        left operand: the state, packed in registers; right: w's tile
//     h^T [16, 128] += E(d v_new)^T k      left operand: v_new, packed in registers;     right: k's tile
// Two more warps keep tiles moving: cp.async of w, k, u kStages - 1 chunks ahead, gates through registers, and the
// stores of E(h) and v_new of the chunk before. One barrier a chunk.
//
// Which BV: 32, as long as every block then has a multiprocessor of its own, otherwise 64, which brings each tile of w
// and k in for twice the columns. The bits of a column do not depend on it.
//
// Shared memory: kStages x (w, k [64, 128] and u [64, BV], 16-bit, swizzled, v_new written over u; d [64] and e_last),
// and two tiles [128, BV] of E(h) on their way out: BV = 32: 162 KB, BV = 64: 153 KB.
//
// Roundings and summation order. w h over K ascending, 16 at a time inside the tensor core, in one fp32 accumulator;
// v_new = E(u - that). The update's operand is E(d_j * v_new_j) of the *rounded* v_new, so that it can be formed again
// from what is stored. e_last h in fp32, then the update over tokens ascending into the same accumulators.
#include "cuda/chain.hpp"
#include "cuda/programs.hpp"
#include "cuda/tile/fwd_step.cuh"
#include "cuda/tile/segment.cuh"

namespace cake_gdn::cuda {

namespace {

template <int BV>
constexpr int kStages = BV == 32 ? 4 : 3;

template <int BV>
struct Smem {
    FwdStage<BV> stages[kStages<BV>];
    alignas(128) char h[2][Tile<BV>::bytes(kStateRows)];
};

template <class E, int BV>
__global__ void __launch_bounds__(kScanThreads<BV>, 1) fwd_scan(const __grid_constant__ cake_gdn_fwd_scan_params p) {
    extern __shared__ __align__(128) char memory[];
    Smem<BV> &smem = *reinterpret_cast<Smem<BV> *>(memory);
    const int K = static_cast<int>(p.K), V = static_cast<int>(p.V), Vw = CAKE_GDN_WIDTH(V);
    const ScanBlock block = scan_block(p, blocks_of(V, BV));
    const Segment segment = block.segment;
    if (segment.sequence < 0) return;
    const int v0 = block.column_block * BV;
    const int64_t head = block.head, hv = p.head_begin + head, hk = hv / (p.HV / p.H);
    const ChunkRange range = chunk_range(p, segment.chunk, segment.chunk + segment.chunks);

    constexpr int kComputing = BV / kWarpColumns * 32;  // threads
    if (threadIdx.x < kComputing) {
        const int m0 = threadIdx.x / 32 * kWarpColumns;  // the warp's first column in the block
        State state;
        load_start(state, p, CAKE_GDN_STATE_OF(p, initial_state), segment.first, segment, segment.seam_before(), head,
                   v0 + m0);
        const auto compute = [&](int64_t i, int stage) {
            const Tile<BV> u{ptx::shared_address(smem.stages[stage].u)}, h{ptx::shared_address(smem.h[i % 2])};
            fwd_step<E>(
                state, smem.stages[stage], m0,
                [&](const uint32_t (&operand)[8][4]) {
#pragma unroll
                    for (int step = 0; step < 8; ++step) store_a_transposed(h, operand[step], m0, 16 * step);
                },
                [&](const uint32_t (&v)[4], int step) { store_a_transposed(u, v, m0, 16 * step); });
        };
        compute_steps<kStages<BV>, kScanThreads<BV>>(range.count, compute);
        if (segment.last) {
            store_state(state, CAKE_GDN_STATE_OF(p, final_state), segment.sequence, hv, K, V, v0 + m0);
        }
        return;
    }
    const int mover = static_cast<int>(threadIdx.x) - kComputing;
    const Rows k_rows = CAKE_GDN_ROWS_OF(p, k);
    TokenGates gates = {};  // of the chunk filled last
    const auto fill = [&](int64_t i, int stage) {
        if (i > 0 && i <= range.count) {
            publish_gates(smem.stages[stage == 0 ? kStages<BV> - 1 : stage - 1], gates, mover);
        }
        if (i >= range.count) return;
        const Chunk c = range.at(i);
        gates = load_token_gates(p, c, hv, mover);
        copy_fwd_stage<E>(smem.stages[stage], p, k_rows, c, head, hk, v0, true, mover);
    };
    const auto drain = [&](int64_t i, int stage) {
        const Chunk c = range.at(i);
        if (!c.first) {
            E *h = static_cast<E *>(p.h) + (c.slot * p.h_heads + hv - p.h_begin) * p.K * Vw + v0;
            store_columns<E, kStateRows>(Tile<BV>{ptx::shared_address(smem.h[i % 2])}, h, Vw, K, Vw - v0, mover);
        }
        store_columns<E, C>(Tile<BV>{ptx::shared_address(smem.stages[stage].u)},
                            slice_at(static_cast<E *>(p.u), p, c, head, Vw) + v0, p.heads * Vw, c.length, Vw - v0,
                            mover);
    };
    move_steps<kStages<BV>, kScanThreads<BV>>(range.count, fill, drain);

    // Packing can leave the slot behind a sequence's last one without an owner (plan.hpp, state_slot): when the next
    // sequence starts in a later block of 64 tokens. It is cleared, so that every byte of h is defined.
    if (range.count == 0 || !segment.last) return;
    const Chunk c = range.at(range.count - 1);
    const int64_t end = c.t + c.length;
    if (c.t / C < end / C && c.t / C < (p.T - 1) / C) {
        E *h = static_cast<E *>(p.h) + (next_slot(c) * p.h_heads + hv - p.h_begin) * p.K * Vw + v0;
        clear_columns<E, BV>(h, Vw, K, Vw - v0, mover);
    }
}

template <int BV>
void run(const cake_gdn_fwd_scan_params &p, void *stream) {
    run_blocks("fwd_scan", p, segment_blocks(p, blocks_of(p.V, BV)), sizeof(Smem<BV>), kScanThreads<BV>, stream,
               fwd_scan<ptx::bf16, BV>, fwd_scan<ptx::fp16, BV>);
}

}  // namespace

void run_fwd_scan(const cake_gdn_fwd_scan_params &p, void *stream) {
    check_segments("fwd_scan", p);
    scan_columns(p, traits(p.device).multiprocessors) == 32 ? run<32>(p, stream) : run<64>(p, stream);
}

}  // namespace cake_gdn::cuda
