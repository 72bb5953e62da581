// The GPU chain's plan: grids' bounds, slices of heads and the workspace, from shapes and the device.
#include <string>

#include "plan/plan.hpp"

namespace cake_gdn::plan {

namespace {

// Stages of the chain in the order in which they run, forward or backward; they bound the lives of the buffers.
enum GpuStage : int { kPrepare, kWy, kLocal, kScan, kResult, kKeys, kFinalize, kGates };

// What a scan slice and a tail slice may take. Below these the slices only cost launches; the scans of a slice need
// enough heads to fill the device, so the first is the larger one.
constexpr int64_t kScanSliceBytes = int64_t(3) << 30;
constexpr int64_t kTailSliceBytes = int64_t(256) << 20;

constexpr int64_t kElement = 2;  // bytes of bf16 and fp16

// The largest slice of whole groups that stays within `budget`, at least one group; equal slices where possible.
int64_t slice(int64_t heads, int64_t group, int64_t bytes_per_head, int64_t budget) {
    const int64_t groups = heads / group;
    const int64_t count = std::min(groups, ceil_div(product(heads, bytes_per_head), budget));
    return ceil_div(groups, std::max<int64_t>(count, 1)) * group;
}

bool fuse_tail(const Shape &s, const Pins &pins) {
    const bool possible = s.group() <= kTailGroup;
    if (pins.tail == Pins::Tail::kFused && !possible) {
        throw InvalidPlan("plan has \"tail=fused\", but a key head has " + std::to_string(s.group()) +
                          " value heads; it must be at most " + std::to_string(kTailGroup) +
                          " of them, or tail=separate");
    }
    return possible && pins.tail != Pins::Tail::kSeparate;
}

}  // namespace

GpuPlan plan_gpu(const Shape &s, const Traits &traits, const Pins &pins) {
    GpuPlan plan{};
    const int64_t tokens = product(s.B, s.T), slots = state_slots(s.B, s.T), Kw = row_width(s.K), Vw = row_width(s.V);
    plan.segment_chunks = std::min(segment_length(s, traits, pins), std::max<int64_t>(1, s.sequence_chunks()));
    plan.max_chunks = table_chunks(tokens, s.N);
    plan.max_segments = table_segments(tokens, s.N, plan.segment_chunks);
    // A dense batch's rows are as long as each other: that is less than what the table has to have for any offsets.
    plan.seams = s.B > 1 ? s.B * (std::max<int64_t>(1, ceil_div(s.sequence_chunks(), plan.segment_chunks)) - 1)
                         : plan.max_segments - s.N;
    plan.scan_segments = s.N + plan.seams;

    // Bytes that a value head of the scan slice holds: w, u, and in the backward dv and dh, and h unless it is saved.
    const int64_t rows = product(tokens, kElement), state = product(slots, s.K, Vw, kElement);
    const bool own_states = !s.saved_states;
    const int64_t seam_state = product(plan.seams, s.V, Kw, 4), transition = product(plan.seams, 2, s.K, Kw, 2);
    const int64_t scan_head = product(rows, Kw + Vw) + seam_state + transition + (own_states ? state : 0) +
                              (s.backward ? product(rows, Vw) + state : 0);
    plan.scan_heads = s.saved_states ? s.HV : slice(s.HV, s.group(), scan_head, kScanSliceBytes);
    plan.tail_fused = fuse_tail(s, pins);
    plan.tail_heads =
        plan.tail_fused ? plan.scan_heads : slice(plan.scan_heads, s.group(), product(3, rows, Kw), kTailSliceBytes);

    const bool pack_qk = s.normalise || s.pack_qk, lend = s.backward && plan.tail_fused;
    plan.q_in_dq = pack_qk && lend && s.dense_dq;
    plan.k_in_dk = pack_qk && lend && s.dense_dk;
    plan.du_in_dv = lend && s.dense_dv && plan.scan_heads == s.HV;

    Arena arena(kGpuAlignment);
    const auto place = [&](int64_t elements, int64_t bytes, int first, int last) {
        return arena.place(product(elements, bytes), first, last);
    };
    plan.offsets = place(s.N + 1, 8, kPrepare, kGates);
    plan.sequence_chunk = place(s.N + 1, 8, kPrepare, kGates);
    plan.sequence_segment = place(s.N + 1, 8, kPrepare, kGates);
    plan.chunks = place(plan.max_chunks, 16, kPrepare, kGates);
    plan.segments = place(plan.max_segments, 16, kPrepare, kGates);
    plan.cum = place(product(s.HV, tokens), 4, kPrepare, kGates);
    plan.reset = place(product(s.HV, tokens), 1, kPrepare, kGates);
    plan.step = place(product(s.HV, tokens), 4, kPrepare, kGates);
    if (pack_qk && !plan.q_in_dq) plan.q = place(product(tokens, s.H, Kw), kElement, kPrepare, kFinalize);
    if (pack_qk && !plan.k_in_dk) plan.k = place(product(tokens, s.H, Kw), kElement, kPrepare, kFinalize);
    // The slices run the stages from kWy on again and again: what all of them read or write lives from the start, and
    // what a later tail slice reads lives to the last of its stages.
    if (s.pack_v) plan.v = place(product(tokens, s.HV, Vw), kElement, kPrepare, kFinalize);
    const int64_t heads = plan.scan_heads, tail = plan.tail_heads;
    const int last = s.backward ? kFinalize : kResult;
    if (s.backward) {
        if (s.normalise) {
            plan.q_rstd = place(product(tokens, s.H), 4, kPrepare, kFinalize);
            plan.k_rstd = place(product(tokens, s.H), 4, kPrepare, kFinalize);
        }
        if (s.pack_do) plan.d_o = place(product(tokens, s.HV, Vw), kElement, kPrepare, kFinalize);
        plan.dcum = place(product(s.HV, tokens), 4, kPrepare, kGates);
        plan.dstep = place(product(s.HV, tokens), 4, kPrepare, kGates);
        if (s.gate_gradients) plan.partials = place(product(plan.max_chunks, s.HV, 2), 4, kGates, kGates);
        if (own_states) plan.A = place(product(tokens, s.HV, kChunk), kElement, kWy, kFinalize);
    }
    plan.u = place(product(tokens, heads, Vw), kElement, kWy, last);
    if (own_states) plan.h = place(product(slots, heads, s.K, Vw), kElement, kScan, last);
    plan.w = place(product(tokens, heads, Kw), kElement, kWy, kScan);
    if (plan.seams > 0) {
        plan.bound = place(product(heads, plan.max_chunks), 4, kWy, kScan);
        plan.seam_states = place(heads, seam_state, kWy, kScan);
        plan.transitions = place(heads, transition, kWy, kScan);
        plan.forgotten = place(product(plan.seams, heads), 1, kWy, kScan);
    }
    if (s.backward) {
        if (!plan.du_in_dv) plan.dv = place(product(tokens, heads, Vw), kElement, kLocal, kFinalize);
        plan.dh = place(product(slots, heads, s.K, Vw), kElement, kScan, kFinalize);
    }
    if (s.backward && !plan.tail_fused) {
        plan.dq = place(product(tokens, tail, Kw), kElement, kKeys, kFinalize);
        plan.dk = place(product(tokens, tail, Kw), kElement, kKeys, kFinalize);
        plan.dw = place(product(tokens, tail, Kw), kElement, kKeys, kFinalize);
    }
    plan.bytes = arena.size();
    return plan;
}

}  // namespace cake_gdn::plan
