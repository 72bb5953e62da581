// fwd_prescan: what a segment makes of the state before it, X' = S + M X, so that all segments can be scanned at once.
//
//     S [K, V]: fwd_scan's recurrence from a zero state
//     M [K, K]: the same with u = 0 from the identity: column j is what becomes of the state's row j
//
// of every segment but its sequence's last one. Where the segment forgets X (tile/segment.cuh), only the chunks at its end
// that remember one another are walked over and M is left out: X' = S.
//
// Tile map. One block a (segment, value head, BV columns of [V | K]), whose warps and movers are those of fwd_scan
// (tile/fwd_step.cuh, tile/state.cuh): a block of M reads no u, and nothing is stored on the way. Blocks of one head are
// next to each other, so that w and k come from L2. Every block finds out for itself how far the segment remembers: of
// M's blocks none is left in a segment that forgets.
// At the end, S goes to global memory in fp32 from registers, and M in two bf16 parts, transposed: pairs of a lane's
// elements are neighbours there, and stitch takes them as they are.
//
// Shared memory: 3 x (w, k [64, 128] and u [64, BV], 16-bit, swizzled; d [64] and e_last): 122 KB.
//
// Roundings and summation order: fwd_scan's.
#include "cuda/chain.hpp"
#include "cuda/programs.hpp"
#include "cuda/tile/fwd_step.cuh"
#include "cuda/tile/segment.cuh"

namespace cake_gdn::cuda {

namespace {

constexpr int BV = 64;
constexpr int kStages = 3;

struct Smem {
    FwdStage<BV> stages[kStages];
};

template <class E>
__global__ void __launch_bounds__(kScanThreads<BV>, 1)
    fwd_prescan(const __grid_constant__ cake_gdn_fwd_prescan_params p) {
    extern __shared__ __align__(128) char memory[];
    Smem &smem = *reinterpret_cast<Smem *>(memory);
    const PrescanBlock block = prescan_block(p, BV);
    const Segment &segment = block.segment;
    if (segment.sequence < 0 || segment.last) return;
    const int64_t head = block.head, hv = p.head_begin + head, hk = hv / (p.HV / p.H), seam = segment.seam_after();
    const Reach reach = reach_of(p.bound + head * p.max_chunks + segment.chunk, segment.chunks, true);
    if (block.transition && reach.forgets) return;
    const int64_t end = segment.chunk + segment.chunks;
    const ChunkRange range = chunk_range(p, end - reach.chunks, end);

    constexpr int kComputing = BV / kWarpColumns * 32;  // threads
    if (threadIdx.x < kComputing) {
        const int m0 = threadIdx.x / 32 * kWarpColumns;  // the warp's first column in the block
        State state;
        start_prescan(state, block.transition, static_cast<int>(p.K), block.v0 + m0);
        compute_steps<kStages, kScanThreads<BV>>(range.count, [&](int64_t, int stage) {
            fwd_step<E>(
                state, smem.stages[stage], m0, [](const uint32_t (&)[8][4]) {}, [](const uint32_t (&)[4], int) {});
        });
        store_prescan(state, p, block, seam, m0);
        if (threadIdx.x == 0 && block.v0 == 0 && !block.transition) p.forgotten[seam * p.heads + head] = reach.forgets;
        return;
    }
    const int mover = static_cast<int>(threadIdx.x) - kComputing;
    const Rows k_rows = CAKE_GDN_ROWS_OF(p, k);
    TokenGates gates = {};  // of the chunk filled last
    const auto fill = [&](int64_t i, int stage) {
        if (i > 0 && i <= range.count) {
            publish_gates(smem.stages[stage == 0 ? kStages - 1 : stage - 1], gates, mover);
        }
        if (i >= range.count) return;
        const Chunk c = range.at(i);
        gates = load_token_gates(p, c, hv, mover);
        copy_fwd_stage<E>(smem.stages[stage], p, k_rows, c, head, hk, block.v0, !block.transition, mover);
    };
    move_steps<kStages, kScanThreads<BV>>(range.count, fill, [](int64_t, int) {});
}

}  // namespace

void run_fwd_prescan(const cake_gdn_fwd_prescan_params &p, void *stream) {
    check_segments("fwd_prescan", p);
    run_blocks("fwd_prescan", p, segment_blocks(p, prescan_blocks(p, BV)), sizeof(Smem), kScanThreads<BV>, stream,
               fwd_prescan<ptx::bf16>, fwd_prescan<ptx::fp16>);
}

}  // namespace cake_gdn::cuda
