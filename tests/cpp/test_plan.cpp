// The planner: arena, slots of saved states, the plan of the CPU engine.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "plan/plan.hpp"
#include "support.hpp"

using namespace cake_gdn::plan;
using cake_gdn_test::Random;

namespace {

struct Request {
    int64_t bytes;
    int first, last;
};

std::vector<Request> random_requests(Random &random) {
    std::vector<Request> requests;
    const int64_t count = random.integer(1, 40);
    for (int64_t i = 0; i < count; ++i) {
        const int first = int(random.integer(0, 7)), last = int(random.integer(first, 7));
        requests.push_back({random.integer(0, 9) == 0 ? 0 : random.integer(1, 5000), first, last});
    }
    return requests;
}

std::vector<Buffer> place_all(Arena &arena, const std::vector<Request> &requests) {
    std::vector<Buffer> placed;
    for (const Request &r : requests) placed.push_back(arena.place(r.bytes, r.first, r.last));
    return placed;
}

bool lives_meet(const Request &a, const Request &b) { return a.first <= b.last && b.first <= a.last; }
bool bytes_meet(const Buffer &a, const Buffer &b) {
    return a.bytes > 0 && b.bytes > 0 && a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
}

Shape shape(int64_t N, int64_t T, int64_t H, int64_t HV, int64_t K, int64_t V, bool backward, bool saved) {
    Shape s{};
    s.B = N, s.T = T, s.H = H, s.HV = HV, s.K = K, s.V = V, s.N = N;
    s.state_bytes = 4;
    s.backward = backward;
    s.saved_states = saved;
    s.gate_gradients = backward;
    return s;
}

// Every buffer of a thread's scratch with its required size, as the engine uses it.
struct Named {
    const char *name;
    Buffer buffer;
    int64_t elements;
};
std::vector<Named> scratch_buffers(const Shape &s, const CpuPlan &plan) {
    const CpuScratch &c = plan.scratch;
    const int64_t C = kChunk, state = s.group() * c.Kp * c.Vp;
    std::vector<Named> all = {{"q", c.q, C * c.Kp},      {"k", c.k, C * c.Kp},
                              {"kt", c.kt, c.Kp * C},    {"kk", c.kk, C * C},
                              {"qk", c.qk, C * C},       {"decay", c.decay, C * C},
                              {"lower", c.lower, C * C}, {"u", c.u, C * c.Vp},
                              {"state", c.state, state}, {"x", c.x, C * std::max(c.Kp, c.Vp)}};
    if (!s.backward) return all;
    const std::vector<Named> more = {
        {"y", c.y, C * c.Vp},   {"d_o", c.d_o, C * c.Vp},  {"du", c.du, C * c.Vp},      {"ut", c.ut, c.Vp * C},
        {"zq", c.zq, C * C},    {"wk", c.wk, C * C},       {"pairs", c.pairs, C * C},   {"dq", c.dq, C * c.Kp},
        {"dk", c.dk, C * c.Kp}, {"st", c.st, c.Vp * c.Kp}, {"dst", c.dst, c.Vp * c.Kp}, {"dstate", c.dstate, state}};
    all.insert(all.end(), more.begin(), more.end());
    if (!s.saved_states) {
        all.push_back({"checkpoints", c.checkpoints, ceil_div(s.sequence_chunks(), plan.segment) * state});
        all.push_back({"states", c.states, plan.segment * state});
    }
    return all;
}

}  // namespace

TEST_CASE("arena: buffers whose lives meet share no byte, whatever is asked for") {
    Random random(11);
    int shared = 0;
    for (int round = 0; round < 500; ++round) {
        const std::vector<Request> requests = random_requests(random);
        Arena arena;
        const std::vector<Buffer> placed = place_all(arena, requests);
        int64_t end = 0;
        for (size_t i = 0; i < placed.size(); ++i) {
            CHECK(placed[i].offset >= 0);
            CHECK(placed[i].offset % kAlignment == 0);
            CHECK(placed[i].bytes >= requests[i].bytes);
            CHECK(placed[i].bytes < requests[i].bytes + kAlignment);
            end = std::max(end, placed[i].offset + placed[i].bytes);
            for (size_t j = 0; j < i; ++j) {
                const bool overlap = bytes_meet(placed[i], placed[j]);
                if (lives_meet(requests[i], requests[j])) CHECK_FALSE(overlap);
                shared += overlap;
            }
        }
        CHECK(arena.size() == end);
    }
    CHECK(shared > 1000);  // it does alias
}

TEST_CASE("arena: the size is at least the fullest stage's, and the sum of all when every life meets") {
    Random random(12);
    for (int round = 0; round < 200; ++round) {
        std::vector<Request> requests = random_requests(random);
        Arena arena;
        place_all(arena, requests);
        int64_t fullest = 0, sum = 0;
        for (int stage = 0; stage < 8; ++stage) {
            int64_t bytes = 0;
            for (const Request &r : requests) {
                if (r.first <= stage && stage <= r.last) bytes += round_up(r.bytes, kAlignment);
            }
            fullest = std::max(fullest, bytes);
        }
        CHECK(arena.size() >= fullest);
        Arena crowded;
        for (Request &r : requests) {
            r.first = 0, r.last = 7;
            sum += round_up(r.bytes, kAlignment);
        }
        place_all(crowded, requests);
        CHECK(crowded.size() == sum);
    }
}

TEST_CASE("arena: lives that do not meet share; a gap is filled; nothing asked for is nothing") {
    Arena arena;
    CHECK(arena.size() == 0);
    const Buffer a = arena.place(100, 0, 1), b = arena.place(100, 2, 3), c = arena.place(100, 1, 2);
    CHECK(a.offset == b.offset);
    CHECK(c.offset == 128);
    CHECK(arena.size() == 256);
    // Between two that live on, the hole of one that does not.
    Arena holed;
    holed.place(64, 0, 9);
    const Buffer hole = holed.place(128, 0, 1);
    holed.place(64, 0, 9);
    CHECK(holed.place(128, 2, 3).offset == hole.offset);
    CHECK(holed.place(192, 2, 3).offset == 256);
    CHECK(holed.place(0, 0, 9).bytes == 0);
}

TEST_CASE("arena: the same requests give the same places") {
    Random random(13);
    const std::vector<Request> requests = random_requests(random);
    Arena first, second;
    const std::vector<Buffer> a = place_all(first, requests), b = place_all(second, requests);
    for (size_t i = 0; i < a.size(); ++i) {
        CHECK(a[i].offset == b[i].offset);
        CHECK(a[i].bytes == b[i].bytes);
    }
}

TEST_CASE("state slots: no two chunks of any packing share one, and all are in bounds") {
    Random random(14);
    for (int round = 0; round < 2000; ++round) {
        std::vector<int64_t> offsets{0};
        const int64_t N = random.integer(1, 12);
        for (int64_t n = 0; n < N; ++n) {
            const int64_t kind = random.integer(0, 4);
            const int64_t length = kind == 0   ? 0
                                   : kind == 1 ? random.integer(1, 3)
                                   : kind == 2 ? 64 * random.integer(1, 3) + random.integer(-1, 1)
                                               : random.integer(1, 400);
            offsets.push_back(offsets.back() + length);
        }
        const int64_t T = offsets.back(), slots = state_slots(1, T);
        std::set<int64_t> used;
        for (int64_t n = 0; n < N; ++n) {
            for (int64_t t = offsets[size_t(n)] + kChunk; t < offsets[size_t(n) + 1]; t += kChunk) {
                const int64_t slot = state_slot(0, T, t);
                CHECK(slot >= 0);
                CHECK(slot < slots);
                CHECK(used.insert(slot).second);
                CHECK(slot == t / 64 - 1);
            }
        }
    }
}

TEST_CASE("state slots: dense batches use every slot once, in order") {
    for (int64_t T : {0, 1, 63, 64, 65, 127, 128, 129, 640, 641, 1000}) {
        for (int64_t B : {0, 1, 3}) {
            int64_t expected = 0;
            for (int64_t b = 0; b < B; ++b) {
                for (int64_t t = kChunk; t < T; t += kChunk) CHECK(state_slot(b, T, t) == expected++);
            }
            CHECK(state_slots(B, T) == expected);
            CHECK(cake_gdn_state_slots(B, T) == expected);
        }
    }
    CHECK(state_slots(1, int64_t(1) << 40) == (int64_t(1) << 34) - 1);
    CHECK(state_slot(0, int64_t(1) << 40, (int64_t(1) << 40) - 64) == (int64_t(1) << 34) - 2);
}

TEST_CASE("cpu plan: buffers are large enough, aligned, inside the scratch") {
    Random random(15);
    for (int round = 0; round < 300; ++round) {
        const int64_t H = random.integer(1, 4), HV = H * random.integer(1, 4);
        Shape s = shape(random.integer(0, 5), random.integer(0, 5000), H, HV, random.integer(1, 512),
                        random.integer(1, 512), random.integer(0, 1), random.integer(0, 1));
        s.state_bytes = random.integer(0, 1) ? 4 : 8;
        const CpuPlan plan = plan_cpu(s, Traits{int(random.integer(1, 8))});
        const int64_t lanes = kAlignment / s.state_bytes;
        CHECK(plan.scratch.Kp >= s.K);
        CHECK(plan.scratch.Kp < s.K + lanes);
        CHECK(plan.scratch.Kp % lanes == 0);
        CHECK(plan.scratch.Vp >= s.V);
        CHECK(plan.scratch.Vp % lanes == 0);
        for (const Named &b : scratch_buffers(s, plan)) {
            CAPTURE(std::string(b.name));
            CHECK(b.buffer.bytes >= b.elements * s.state_bytes);
            CHECK(b.buffer.offset % kAlignment == 0);
            CHECK(b.buffer.offset + b.buffer.bytes <= plan.scratch.bytes);
        }
        CHECK(plan.scratch.bytes % kAlignment == 0);
        CHECK(plan.thread_offset % kAlignment == 0);
        const int64_t partials = s.gate_gradients ? s.N * s.HV * 16 : 0;
        CHECK(plan.gate_partials.bytes >= partials);
        CHECK(plan.gate_partials.offset + partials <= plan.thread_offset);
        // The workspace may start at any byte.
        CHECK(plan.bytes >= plan.thread_offset + plan.threads * plan.scratch.bytes + kAlignment - 1);
    }
}

TEST_CASE("cpu plan: what lives through a chunk overlaps nothing; aliases are of lives that do not meet") {
    const Shape s = shape(2, 1000, 2, 6, 100, 60, true, false);
    const CpuPlan plan = plan_cpu(s, Traits{2});
    const CpuScratch &c = plan.scratch;
    const std::vector<Named> all = scratch_buffers(s, plan);
    const std::vector<Buffer> always{c.q,      c.k,  c.kt, c.kk,          c.qk,    c.state,
                                     c.dstate, c.dq, c.dk, c.checkpoints, c.states};
    for (const Buffer &keep : always) {
        int met = 0;
        for (const Named &b : all) met += bytes_meet(keep, b.buffer);
        CHECK(met == 1);  // itself
    }
    // Read together by one operation of the engine.
    const std::vector<std::pair<Buffer, Buffer>> together{
        {c.x, c.u},      {c.lower, c.u},  {c.decay, c.lower}, {c.du, c.zq},  {c.du, c.d_o},   {c.du, c.lower},
        {c.du, c.u},     {c.ut, c.wk},    {c.ut, c.zq},       {c.wk, c.zq},  {c.wk, c.pairs}, {c.zq, c.pairs},
        {c.wk, c.decay}, {c.zq, c.decay}, {c.du, c.y},        {c.st, c.x},   {c.dst, c.x},    {c.st, c.d_o},
        {c.st, c.du},    {c.dst, c.u},    {c.dst, c.d_o},     {c.dst, c.wk}, {c.st, c.wk},    {c.pairs, c.dst},
        {c.d_o, c.ut},   {c.u, c.y},      {c.y, c.decay},     {c.u, c.pairs}};
    for (size_t i = 0; i < together.size(); ++i) {
        CAPTURE(i);
        CHECK_FALSE(bytes_meet(together[i].first, together[i].second));
    }
}

TEST_CASE("cpu plan: threads are bounded by the caller, by the units and by the work") {
    for (int limit : {1, 2, 3, 8, 64, 1 << 30}) {
        CHECK(plan_cpu(shape(1, 100000, 1, 1, 128, 128, false, false), Traits{limit}).threads == 1);
        CHECK(plan_cpu(shape(3, 100000, 2, 4, 128, 128, true, false), Traits{limit}).threads == std::min(limit, 6));
        CHECK(plan_cpu(shape(64, 1, 8, 8, 16, 16, false, false), Traits{limit}).threads == 1);  // too little to do
        CHECK(plan_cpu(shape(0, 0, 8, 8, 16, 16, false, false), Traits{limit}).threads == 1);
        CHECK(plan_cpu(shape(64, 0, 8, 8, 16, 16, true, false), Traits{limit}).threads == 1);
    }
    int last = 0;
    for (int64_t T = 1; T < 1 << 20; T *= 2) {
        const int threads = plan_cpu(shape(4, T, 4, 4, 64, 64, true, false), Traits{16}).threads;
        CHECK(threads >= last);
        last = threads;
    }
    CHECK(last == 16);
}

TEST_CASE("cpu plan: units are the (sequence, key head) pairs whatever the threads") {
    const Shape s = shape(7, 300, 3, 9, 64, 64, true, true);
    for (int limit : {1, 2, 8}) CHECK(plan_cpu(s, Traits{limit}).units == 21);
    Shape packed = s;
    packed.B = 1;
    CHECK(plan_cpu(packed, Traits{1}).units == 21);
}

TEST_CASE("cpu plan: without saved states memory grows like the root of the tokens, with them not at all") {
    const auto bytes = [](int64_t T, bool saved) {
        return double(plan_cpu(shape(1, T, 1, 1, 64, 64, true, saved), Traits{1}).scratch.bytes);
    };
    const double fixed = bytes(0, true);
    for (int64_t T = 1; T <= int64_t(1) << 40; T *= 8) {
        CAPTURE(T);
        CHECK(bytes(T, true) == fixed);
        const double state = 64 * 64 * 4, chunks = std::ceil(double(T) / 64);
        CHECK(bytes(T, false) <= fixed + state * (2 * std::sqrt(chunks) + 3));
        if (T >= 1 << 18) {
            const double growth = (bytes(16 * T, false) - fixed) / (bytes(T, false) - fixed);
            CHECK(growth == doctest::Approx(4).epsilon(0.05));
        }
    }
    CHECK(plan_cpu(shape(1, 1 << 20, 1, 1, 64, 64, false, false), Traits{1}).scratch.bytes ==
          plan_cpu(shape(1, 1, 1, 1, 64, 64, false, false), Traits{1}).scratch.bytes);
}

TEST_CASE("cpu plan: segments cover the sequence") {
    for (int64_t T :
         {int64_t(0), int64_t(1), int64_t(64), int64_t(65), int64_t(129), int64_t(4096), int64_t(1) << 40}) {
        const Shape s = shape(1, T, 1, 1, 16, 16, true, false);
        const CpuPlan plan = plan_cpu(s, Traits{1});
        CAPTURE(T);
        CHECK(plan.segment >= 1);
        CHECK(plan.segment <= std::max<int64_t>(s.sequence_chunks(), 1));
        CHECK(ceil_div(s.sequence_chunks(), plan.segment) * plan.segment >= s.sequence_chunks());
        CHECK(ceil_div(s.sequence_chunks(), plan.segment) <= plan.segment + 1);
    }
}

TEST_CASE("cpu plan: sizes of zero, and the largest that the checks let through, do not overflow") {
    for (bool backward : {false, true}) {
        for (bool saved : {false, true}) {
            const CpuPlan none = plan_cpu(shape(0, 0, 1, 1, 1, 1, backward, saved), Traits{4});
            CHECK(none.units == 0);
            CHECK(none.threads == 1);
            CHECK(none.bytes > 0);
            const CpuPlan huge = plan_cpu(shape(1, int64_t(1) << 40, 16, 64, 512, 512, backward, saved), Traits{16});
            CHECK(huge.bytes > 0);
            CHECK(huge.threads == 16);
            CHECK(huge.scratch.bytes > 0);
            CHECK(huge.scratch.bytes < int64_t(1) << 41);
            const CpuPlan wide = plan_cpu(shape(int64_t(1) << 31, 1, 1, 1, 1, 1, backward, saved), Traits{1});
            CHECK(wide.units == int64_t(1) << 31);
            CHECK(wide.bytes >= (backward ? int64_t(1) << 35 : 0));
        }
    }
}

TEST_CASE("cpu plan: a function of shapes and traits only") {
    Random random(16);
    for (int round = 0; round < 50; ++round) {
        const Shape s = shape(random.integer(0, 9), random.integer(0, 9000), 2, 4, random.integer(1, 200),
                              random.integer(1, 200), random.integer(0, 1), random.integer(0, 1));
        const Traits traits{int(random.integer(1, 9))};
        const CpuPlan a = plan_cpu(s, traits), b = plan_cpu(s, traits);
        CHECK(a.bytes == b.bytes);
        CHECK(a.threads == b.threads);
        CHECK(a.segment == b.segment);
        CHECK(a.thread_offset == b.thread_offset);
        const std::vector<Named> x = scratch_buffers(s, a), y = scratch_buffers(s, b);
        for (size_t i = 0; i < x.size(); ++i) CHECK(x[i].buffer.offset == y[i].buffer.offset);
        // The segment, and with it the order of the recomputation, does not depend on the threads.
        CHECK(plan_cpu(s, Traits{1}).segment == a.segment);
        CHECK(plan_cpu(s, Traits{1}).scratch.bytes == a.scratch.bytes);
    }
}

// ---- the GPU chain ----

namespace {

Shape gpu_shape(int64_t B, int64_t T, int64_t H, int64_t HV, bool backward, bool saved) {
    Shape s = shape(B, T, H, HV, 128, 128, backward, saved);
    s.state_bytes = 2;
    s.normalise = true;
    return s;
}

// An H200's, as far as a plan looks at it.
Traits h200() {
    Traits traits;
    traits.capability = 90, traits.multiprocessors = 132;
    return traits;
}

Pins pinned(int64_t segment_chunks) {
    Pins pins;
    pins.segment_chunks = segment_chunks;
    return pins;
}

std::vector<std::pair<const char *, Buffer>> gpu_buffers(const GpuPlan &p) {
    return {{"offsets", p.offsets},
            {"sequence_chunk", p.sequence_chunk},
            {"sequence_segment", p.sequence_segment},
            {"chunks", p.chunks},
            {"segments", p.segments},
            {"cum", p.cum},
            {"reset", p.reset},
            {"step", p.step},
            {"q", p.q},
            {"k", p.k},
            {"v", p.v},
            {"d_o", p.d_o},
            {"q_rstd", p.q_rstd},
            {"k_rstd", p.k_rstd},
            {"dcum", p.dcum},
            {"dstep", p.dstep},
            {"A", p.A},
            {"u", p.u},
            {"h", p.h},
            {"dv", p.dv},
            {"dh", p.dh},
            {"dq", p.dq},
            {"dk", p.dk},
            {"dw", p.dw}};
}

}  // namespace

TEST_CASE("gpu plan: slices are whole groups that cover all heads, and bound the memory") {
    Random random(21);
    for (int round = 0; round < 300; ++round) {
        const int64_t H = random.integer(1, 16), group = random.integer(1, 12), T = random.integer(0, 200000);
        const Shape s = gpu_shape(random.integer(1, 4), T, H, H * group, random.integer(0, 1), random.integer(0, 1));
        const GpuPlan plan = plan_gpu(s, h200(), pinned(random.integer(0, 40)));
        CHECK(plan.scan_heads % group == 0);
        CHECK(plan.tail_heads % group == 0);
        CHECK(plan.scan_heads >= group);
        CHECK(plan.scan_heads <= s.HV);
        CHECK(plan.tail_heads >= group);
        CHECK(plan.tail_heads <= plan.scan_heads);
        if (s.saved_states) CHECK(plan.scan_heads == s.HV);
        CHECK(plan.tail_fused == (group <= kTailGroup));
        if (plan.tail_fused) {
            CHECK(plan.tail_heads == plan.scan_heads);
            CHECK(plan.dq.bytes + plan.dk.bytes + plan.dw.bytes == 0);
        }
    }
}

TEST_CASE("gpu plan: what is alive together does not overlap") {
    // From dqkwg on, everything but w is alive at once: the tail slices read it again and again.
    Random random(22);
    for (int round = 0; round < 200; ++round) {
        const int64_t H = random.integer(1, 8), group = random.integer(1, 12);
        Shape s = gpu_shape(random.integer(1, 3), random.integer(1, 5000), H, H * group, true, random.integer(0, 1));
        s.K = random.integer(1, 128), s.V = random.integer(1, 128);
        s.normalise = random.integer(0, 1), s.pack_qk = random.integer(0, 1);
        s.pack_v = random.integer(0, 1), s.pack_do = random.integer(0, 1);
        const GpuPlan plan = plan_gpu(s, h200(), pinned(random.integer(0, 20)));
        const auto buffers = gpu_buffers(plan);
        for (size_t i = 0; i < buffers.size(); ++i) {
            CHECK(buffers[i].second.offset % kGpuAlignment == 0);
            CHECK(buffers[i].second.offset + buffers[i].second.bytes <= plan.bytes);
            for (size_t j = 0; j < i; ++j) {
                CAPTURE(buffers[i].first);
                CAPTURE(buffers[j].first);
                CHECK_FALSE(bytes_meet(buffers[i].second, buffers[j].second));
            }
        }
        // The pre-scans, the stitch and the scans.
        const std::vector<std::pair<const char *, Buffer>> scans = {{"bound", plan.bound},
                                                                    {"seam_states", plan.seam_states},
                                                                    {"transitions", plan.transitions},
                                                                    {"forgotten", plan.forgotten},
                                                                    {"w", plan.w}};
        for (size_t i = 0; i < scans.size(); ++i) {
            CAPTURE(scans[i].first);
            CHECK(scans[i].second.offset + scans[i].second.bytes <= plan.bytes);
            for (size_t j = 0; j < i; ++j) CHECK_FALSE(bytes_meet(scans[i].second, scans[j].second));
            for (const auto &[name, buffer] : buffers) {
                const std::string of_tail(name);
                if (of_tail == "dq" || of_tail == "dk" || of_tail == "dw") continue;
                CAPTURE(name);
                CHECK_FALSE(bytes_meet(scans[i].second, buffer));
            }
        }
        CHECK(plan.seam_states.bytes >= plan.seams * plan.scan_heads * s.V * row_width(s.K) * 4);
        CHECK(plan.transitions.bytes >= plan.seams * plan.scan_heads * s.K * row_width(s.K) * 4);
    }
}

TEST_CASE("gpu plan: the tail is fused for small groups, and as it is pinned") {
    const Pins fused = parse_pins("tail=fused"), separate = parse_pins("tail=separate");
    const Shape small = gpu_shape(1, 4096, 2, 16, true, true), large = gpu_shape(1, 4096, 2, 18, true, true);
    CHECK(plan_gpu(small, h200()).tail_fused);
    CHECK(plan_gpu(small, h200(), fused).tail_fused);
    CHECK_FALSE(plan_gpu(small, h200(), separate).tail_fused);
    CHECK_FALSE(plan_gpu(large, h200()).tail_fused);
    CHECK_THROWS_WITH_AS(plan_gpu(large, h200(), fused), doctest::Contains("a key head has 9 value heads"),
                         InvalidPlan);
}

TEST_CASE("gpu plan: gradients lend their memory to what the fused tail reads before it writes them") {
    Shape s = gpu_shape(1, 65536, 16, 32, true, true);
    const GpuPlan apart = plan_gpu(s, h200());
    s.dense_dq = s.dense_dk = s.dense_dv = true;
    const GpuPlan lent = plan_gpu(s, h200());
    CHECK((lent.q_in_dq && lent.k_in_dk && lent.du_in_dv));
    CHECK((lent.q.bytes == 0 && lent.k.bytes == 0 && lent.dv.bytes == 0));
    CHECK(lent.bytes == apart.bytes - apart.q.bytes - apart.k.bytes - apart.dv.bytes);
    const GpuPlan separate = plan_gpu(s, h200(), parse_pins("tail=separate"));
    CHECK_FALSE((separate.q_in_dq || separate.k_in_dk || separate.du_in_dv));
    s.saved_states = false;  // in slices of heads, whose du lies closer than dv
    CHECK((plan_gpu(s, h200()).q_in_dq && !plan_gpu(s, h200()).du_in_dv));
    s.normalise = false;  // q and k are read where they are
    CHECK_FALSE((plan_gpu(s, h200()).q_in_dq || plan_gpu(s, h200()).k_in_dk));
}

TEST_CASE("gpu plan: w makes room for what comes after the scans") {
    const GpuPlan plan =
        plan_gpu(gpu_shape(1, 65536, 2, 32, true, true), h200());  // groups too large for the fused tail
    int64_t sum = plan.w.bytes;
    for (const auto &buffer : gpu_buffers(plan)) sum += buffer.second.bytes;
    CHECK(plan.bytes < sum);
}

TEST_CASE("gpu plan: no buffer grows with the number of sequences times the state") {
    Shape few = gpu_shape(1, 100000, 4, 8, true, true);
    Shape many = few;
    many.N = 70000;
    // Only what a chunk has of its own may: 24 bytes of prefix sums, 16 of each table's entries, and a head's bound.
    for (int64_t length : {int64_t(0), int64_t(16), kWholeSequences}) {
        const Pins pins = pinned(length);
        CHECK(plan_gpu(many, h200(), pins).bytes - plan_gpu(few, h200(), pins).bytes < (80 + 4 * many.HV) * many.N);
    }
}

TEST_CASE("gpu plan: tables are large enough for any packing") {
    Random random(23);
    for (int round = 0; round < 300; ++round) {
        const int64_t N = random.integer(1, 50), T = random.integer(0, 3000), segment = random.integer(1, 9);
        std::vector<int64_t> cuts = {0, T};
        for (int64_t n = 1; n < N; ++n) cuts.push_back(random.integer(0, T));
        std::sort(cuts.begin(), cuts.end());
        int64_t chunks = 0, segments = 0;
        for (int64_t n = 0; n < N; ++n) {
            const int64_t own = ceil_div(cuts[size_t(n) + 1] - cuts[size_t(n)], kChunk);
            chunks += own;
            segments += std::max<int64_t>(1, ceil_div(own, segment));
        }
        CHECK(chunks <= table_chunks(T, N));
        CHECK(segments <= table_segments(T, N, segment));
    }
}

// ---- segments ----

TEST_CASE("segments: enough of them for any packing, and as many seams; a dense batch has just its own") {
    Random random(24);
    for (int round = 0; round < 300; ++round) {
        const int64_t N = random.integer(1, 50), T = random.integer(0, 3000), length = random.integer(1, 9);
        Shape s = gpu_shape(1, T, 1, 2, true, false);
        s.N = N;
        const GpuPlan plan = plan_gpu(s, h200(), pinned(length));
        std::vector<int64_t> cuts = {0, T};
        for (int64_t n = 1; n < N; ++n) cuts.push_back(random.integer(0, T));
        std::sort(cuts.begin(), cuts.end());
        int64_t segments = 0;
        for (int64_t n = 0; n < N; ++n) {
            const int64_t chunks = ceil_div(cuts[size_t(n) + 1] - cuts[size_t(n)], kChunk);
            segments += std::max<int64_t>(1, ceil_div(chunks, plan.segment_chunks));
        }
        CHECK(plan.scan_segments <= plan.max_segments);
        CHECK(segments <= plan.scan_segments);
        CHECK(segments - N <= plan.seams);

        const GpuPlan dense = plan_gpu(gpu_shape(N, T, 1, 2, true, false), h200(), pinned(length));
        CHECK(dense.scan_segments == N * std::max<int64_t>(1, ceil_div(ceil_div(T, kChunk), dense.segment_chunks)));
        CHECK(dense.seams == dense.scan_segments - N);
    }
}

TEST_CASE("segments: forward and backward, with and without saved states, cut alike") {
    Random random(25);
    for (int round = 0; round < 300; ++round) {
        const int64_t H = random.integer(1, 16), HV = H * random.integer(1, 4);
        Shape s = gpu_shape(random.integer(1, 4), random.integer(0, 200000), H, HV, false, false);
        s.batch_invariant = random.integer(0, 1);
        const int64_t length = plan_gpu(s, h200()).segment_chunks;
        CHECK(length >= 1);
        for (int which = 1; which < 16; ++which) {
            Shape other = s;
            other.backward = which & 1, other.saved_states = which & 2, other.gate_gradients = which & 4;
            other.normalise = other.pack_qk = other.pack_v = other.pack_do = which & 8;
            CHECK(plan_gpu(other, h200()).segment_chunks == length);
        }
    }
}

TEST_CASE("segments: cut where few heads leave SMs idle, and not where they do not") {
    const auto seams = [](int64_t B, int64_t T, int64_t HV) {
        return plan_gpu(gpu_shape(B, T, HV, HV, true, true), h200()).seams;
    };
    CHECK(seams(1, 32768, 8) > 0);
    CHECK(seams(1, 8192, 8) > 0);
    CHECK(seams(1, 8192, 64) == 0);
    CHECK(seams(16, 8192, 8) == 0);
    CHECK(seams(1, 512, 2) == 0);
    // More SMs, shorter segments; an unknown device and one with no SM at all have a plan too.
    const Shape s = gpu_shape(1, 65536, 8, 8, true, true);
    int64_t last = kWholeSequences;
    for (int count : {1, 16, 64, 132, 264, 1000}) {
        Traits traits = h200();
        traits.multiprocessors = count;
        const int64_t length = plan_gpu(s, traits).segment_chunks;
        CHECK(length <= last);
        last = length;
    }
    CHECK(last < 64);
    CHECK(plan_gpu(s, Traits{}).segment_chunks >= 1);
}

TEST_CASE("segments: their memory is bounded") {
    for (int64_t T = 1 << 12; T <= int64_t(1) << 32; T *= 4) {
        for (int64_t HV : {1, 8, 64}) {
            Traits traits = h200();
            traits.multiprocessors = 100000;
            const GpuPlan plan = plan_gpu(gpu_shape(1, T, HV, HV, true, true), traits);
            CHECK(plan.seam_states.bytes + plan.transitions.bytes <= int64_t(1) << 30);
        }
    }
}

TEST_CASE("segments: batch_invariant looks at the heads alone") {
    for (int64_t HV : {1, 2, 8, 16, 32, 64}) {
        std::set<int64_t> lengths;
        for (int64_t B : {1, 5, 70}) {
            for (int count : {1, 78, 132, 216}) {
                Shape s = gpu_shape(B, 1 << 20, HV, HV, true, true);
                s.batch_invariant = true;
                Traits traits = h200();
                traits.multiprocessors = count;
                traits.capability = count == 216 ? 107 : 90;
                lengths.insert(plan_gpu(s, traits).segment_chunks);
                s.N = 700;
                if (B == 1) lengths.insert(plan_gpu(s, traits).segment_chunks);
            }
        }
        CHECK(lengths.size() == 1);
    }
}

TEST_CASE("gpu plan: fp16 is cut only when it is asked for") {
    Shape s = gpu_shape(1, 65536, 2, 8, true, true);
    CHECK(plan_gpu(s, h200()).seams > 0);
    s.fp16 = true;
    CHECK(plan_gpu(s, h200()).seams == 0);
    CHECK(plan_gpu(s, h200(), pinned(64)).seams == 15);
    s.batch_invariant = true;
    CHECK(plan_gpu(s, h200()).seams == 0);
}

TEST_CASE("pins: what is read, and what is refused by name") {
    CHECK(parse_pins(nullptr).segment_chunks == 0);
    CHECK(parse_pins("segment=1").segment_chunks == 1);
    CHECK(parse_pins("segment=32").segment_chunks == 32);
    CHECK(parse_pins("segment=2147483647").segment_chunks == kWholeSequences);
    CHECK(parse_pins("segment=whole").segment_chunks == kWholeSequences);
    CHECK(parse_pins("segment=8").tail == Pins::Tail::kAny);
    CHECK(parse_pins("tail=fused").tail == Pins::Tail::kFused);
    CHECK(parse_pins("tail=separate,segment=8").tail == Pins::Tail::kSeparate);
    CHECK(parse_pins("tail=separate,segment=8").segment_chunks == 8);
    const Shape s = gpu_shape(1, 4096, 64, 64, false, false);
    CHECK(plan_gpu(s, h200(), parse_pins("segment=8")).seams == 7);
    CHECK(plan_gpu(s, h200(), parse_pins("segment=whole")).seams == 0);
    CHECK(plan_gpu(s, h200(), parse_pins("segment=64")).seams == 0);
    const std::pair<const char *, const char *> wrong[] = {{"", "plan has \"\""},
                                                           {"segment", "plan has \"segment\""},
                                                           {"segment=", "1 to 2147483647"},
                                                           {"segment=0", "1 to 2147483647"},
                                                           {"segment=-8", "segment=-8"},
                                                           {"segment=2147483648", "1 to 2147483647"},
                                                           {"segment=99999999999999999999", "1 to 2147483647"},
                                                           {"segment=8x", "segment=8x"},
                                                           {"segment= 8", "1 to 2147483647"},
                                                           {"segments=8", "with the keys segment and tail"},
                                                           {"segment=8,", "with the keys segment and tail"},
                                                           {"segment=8,segment=8", "given once"},
                                                           {"tail=both", "tail=fused or tail=separate"},
                                                           {"tail=fused,tail=fused", "given once"},
                                                           {"tile=3", "tile=3"}};
    for (const auto &[text, message] : wrong) {
        CAPTURE(text);
        std::string what;
        try {
            parse_pins(text);
        } catch (const InvalidPlan &error) {
            what = error.what();
        }
        CHECK(what.find(message) != std::string::npos);
    }
}
