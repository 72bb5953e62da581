// adjoint_prescan: what a segment makes of the gradient of the state after it, dX = dS + M^T dX', so that all segments can
// be scanned at once.
//
//     dS [K, V]:  adjoint_scan's recurrence from a zero gradient
//     M^T [K, K]: the same with do = 0 and dv_local = 0 from the identity; M is fwd_prescan's
//
// of every segment but its sequence's first one. Where the segment forgets (tile/segment.cuh), only the chunks at its start
// that remember one another are walked over and M^T is left out: dX = dS.
//
// Tile map. One block a (segment, value head, BV columns of [V | K]), whose warps and movers are those of adjoint_scan
// (tile/adjoint_step.cuh, tile/state.cuh): a block of M^T reads no q, do and dv_local, and nothing is stored on the way.
// Which blocks there are and what they write at the end: as in fwd_prescan.
//
// Shared memory: 3 x (q, k, w [64, 128] and do, dv [64, BV], 16-bit, swizzled; d and scale e [64], e_last): 194 KB.
//
// Roundings and summation order: adjoint_scan's.
#include "cuda/chain.hpp"
#include "cuda/programs.hpp"
#include "cuda/tile/adjoint_step.cuh"
#include "cuda/tile/segment.cuh"

namespace cake_gdn::cuda {

namespace {

constexpr int BV = 64;
constexpr int kStages = 3;

struct Smem {
    AdjointStage<BV> stages[kStages];
};

template <class E>
__global__ void __launch_bounds__(kScanThreads<BV>, 1)
    adjoint_prescan(const __grid_constant__ cake_gdn_adjoint_prescan_params p) {
    extern __shared__ __align__(128) char memory[];
    Smem &smem = *reinterpret_cast<Smem *>(memory);
    const PrescanBlock block = prescan_block(p, BV);
    const Segment &segment = block.segment;
    if (segment.sequence < 0 || segment.first) return;
    const int64_t head = block.head, hv = p.head_begin + head, hk = hv / (p.HV / p.H), seam = segment.seam_before();
    const Reach reach = reach_of(p.bound + head * p.max_chunks + segment.chunk, segment.chunks, false);
    if (block.transition && reach.forgets) return;
    const ChunkRange range = chunk_range(p, segment.chunk, segment.chunk + reach.chunks);

    constexpr int kComputing = BV / kWarpColumns * 32;  // threads
    if (threadIdx.x < kComputing) {
        const int m0 = threadIdx.x / 32 * kWarpColumns;  // the warp's first column in the block
        State state;
        start_prescan(state, block.transition, static_cast<int>(p.K), block.v0 + m0);
        compute_steps<kStages, kScanThreads<BV>>(range.count, [&](int64_t, int stage) {
            adjoint_step<E>(
                state, smem.stages[stage], m0, !block.transition, [](const uint32_t (&)[8][4]) {},
                [](const uint32_t (&)[4], int) {});
        });
        store_prescan(state, p, block, seam, m0);
        if (threadIdx.x == 0 && block.v0 == 0 && !block.transition) p.forgotten[seam * p.heads + head] = reach.forgets;
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
        const Chunk c = range.at(range.count - 1 - i);
        gates = load_token_gates(p, c, hv, mover);
        copy_adjoint_stage<E>(smem.stages[stage], p, rows, c, head, hv, hk, block.v0, !block.transition, mover);
    };
    move_steps<kStages, kScanThreads<BV>>(range.count, fill, [](int64_t, int) {});
}

}  // namespace

void run_adjoint_prescan(const cake_gdn_adjoint_prescan_params &p, void *stream) {
    check_segments("adjoint_prescan", p);
    run_blocks("adjoint_prescan", p, segment_blocks(p, prescan_blocks(p, BV)), sizeof(Smem), kScanThreads<BV>, stream,
               adjoint_prescan<ptx::bf16>, adjoint_prescan<ptx::fp16>);
}

}  // namespace cake_gdn::cuda
