#include "plan/plan.hpp"

#include <cmath>

namespace cake_gdn::plan {
Buffer Arena::place(int64_t bytes, int first, int last) {
    Buffer buffer{0, round_up(bytes, alignment_)};
    auto at = placed_.begin();
    for (; at != placed_.end(); ++at) {
        const bool lives_meet = first <= at->last && at->first <= last;
        if (!lives_meet) continue;
        if (buffer.offset + buffer.bytes <= at->buffer.offset) break;
        buffer.offset = std::max(buffer.offset, at->buffer.offset + at->buffer.bytes);
    }
    placed_.push_back({buffer, first, last});
    std::stable_sort(placed_.begin(), placed_.end(),
                     [](const Placed &a, const Placed &b) { return a.buffer.offset < b.buffer.offset; });
    size_ = std::max(size_, buffer.offset + buffer.bytes);
    return buffer;
}

namespace {

// Stages of one chunk on the CPU, in the order in which they run; they bound the lives of the scratch buffers.
enum CpuStage : int {
    kScan,     // keys, gates, corrected values; in the forward also the output and the next state
    kAdjoint,  // gradients of the corrected values and of the right-hand side
    kScores,   // gradients of the two score products
    kQuery,    // products with the chunk's starting state: dq, part of dk
    kKey,      // products with the gradient of its final state: rest of dk
    kEnd
};

// A thread below this many multiply-adds costs more to start than it saves.
constexpr double kWorkPerThread = 4e6;

CpuScratch cpu_scratch(const Shape &shape, int64_t segment) {
    const int64_t lanes = kAlignment / shape.state_bytes;
    CpuScratch s{};
    s.Kp = round_up(shape.K, lanes);
    s.Vp = round_up(shape.V, lanes);
    Arena arena;
    const auto matrix = [&](int64_t rows, int64_t columns, int first, int last) {
        return arena.place(product(rows, columns, shape.state_bytes), first, last);
    };
    const int64_t C = kChunk, Kp = s.Kp, Vp = s.Vp, states = product(shape.group(), Kp);
    // Shared by the value heads of a group, or carried from chunk to chunk: alive throughout.
    s.q = matrix(C, Kp, kScan, kEnd);
    s.k = matrix(C, Kp, kScan, kEnd);
    s.kt = matrix(Kp, C, kScan, kEnd);
    s.kk = matrix(C, C, kScan, kEnd);
    s.qk = matrix(C, C, kScan, kEnd);
    s.state = matrix(states, Vp, kScan, kEnd);
    // Of one value head.
    s.decay = matrix(C, C, kScan, kScores);
    s.lower = matrix(C, C, kScan, kAdjoint);
    s.u = matrix(C, Vp, kScan, kKey);
    s.x = matrix(C, std::max(Kp, Vp), kScan, kKey);
    if (!shape.backward) {
        s.bytes = arena.size();
        return s;
    }
    s.dstate = matrix(states, Vp, kScan, kEnd);
    s.dq = matrix(C, Kp, kScan, kEnd);
    s.dk = matrix(C, Kp, kScan, kEnd);
    if (!shape.saved_states) {
        s.checkpoints = matrix(product(ceil_div(shape.sequence_chunks(), segment), states), Vp, kScan, kEnd);
        s.states = matrix(product(segment, states), Vp, kScan, kEnd);
    }
    s.y = matrix(C, Vp, kScan, kScores);
    s.d_o = matrix(C, Vp, kAdjoint, kKey);
    s.du = matrix(C, Vp, kAdjoint, kKey);
    s.ut = matrix(Vp, C, kScores, kScores);
    s.zq = matrix(C, C, kAdjoint, kKey);
    s.wk = matrix(C, C, kScores, kKey);
    s.pairs = matrix(C, C, kScores, kKey);
    s.st = matrix(Vp, Kp, kQuery, kQuery);
    s.dst = matrix(Vp, Kp, kKey, kKey);
    s.bytes = arena.size();
    return s;
}

}  // namespace

CpuPlan plan_cpu(const Shape &shape, const Traits &traits) {
    CpuPlan plan{};
    plan.units = shape.N * shape.H;
    // Recomputed states: with a checkpoint every sqrt(chunks) chunks the memory is two such runs of states.
    plan.segment = std::max<int64_t>(1, std::llround(std::ceil(std::sqrt(double(shape.sequence_chunks())))));
    const double work = double(shape.B) * double(shape.T) * double(shape.HV) * double(shape.K) * double(shape.V) *
                        (shape.backward ? 10.0 : 4.0);
    const double useful = std::min<double>(double(std::max<int64_t>(plan.units, 1)), 1.0 + work / kWorkPerThread);
    plan.threads = int(std::min<double>(traits.host_threads, useful));
    plan.scratch = cpu_scratch(shape, plan.segment);

    Arena arena;
    const int64_t partials = shape.gate_gradients ? product(shape.N, shape.HV, 2, int64_t(sizeof(double))) : 0;
    plan.gate_partials = arena.place(partials, 0, 0);
    plan.thread_offset = arena.place(product(plan.threads, plan.scratch.bytes), 0, 0).offset;
    plan.bytes = arena.size() + kAlignment;  // the caller's memory may start anywhere
    return plan;
}

}  // namespace cake_gdn::plan
