// The CPU engine on one unit: against the recurrence, and the bits that must not depend on anything but the inputs.
#include <doctest/doctest.h>

#include <cfenv>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "support.hpp"

using namespace cake_gdn_test;
namespace cpu = cake_gdn::cpu;

namespace {

// Relative to the largest element of each result.
double tolerance(int dtype) {
    switch (dtype) {
        case CAKE_GDN_BF16: return 6e-3;
        case CAKE_GDN_FP16: return 8e-4;
        case CAKE_GDN_FP32: return 2e-5;
        default: return 1e-11;
    }
}

void check_results(const Case &call, double limit) {
    const Results got = call.results(), wanted = recurrence(call.inputs());
    CHECK(error(got.o, wanted.o) < limit);
    CHECK(error(got.final_state, wanted.final_state) < limit);
    CHECK(error(got.dq, wanted.dq) < limit);
    CHECK(error(got.dk, wanted.dk) < limit);
    CHECK(error(got.dv, wanted.dv) < limit);
    CHECK(error(got.dg, wanted.dg) < limit);
    CHECK(error(got.dbeta, wanted.dbeta) < limit);
    CHECK(error(got.dh0, wanted.dh0) < limit);
    if (call.spec.flags & CAKE_GDN_GATE) {
        CHECK(error(got.dA_log, wanted.dA_log) < limit);
        if (call.spec.dt_bias) CHECK(error(got.ddt_bias, wanted.ddt_bias) < limit);
    }
}

using Bytes = std::vector<std::vector<unsigned char>>;

// Runs both directions through the C interface; the status of the first failure.
cake_gdn_status call_library(Case &call) {
    for (cake_gdn_direction direction : {CAKE_GDN_FORWARD, CAKE_GDN_BACKWARD}) {
        const cake_gdn_problem p = call.problem(direction);
        size_t bytes = 0;
        cake_gdn_status status = cake_gdn_workspace_size(&p, direction, &bytes);
        if (status != CAKE_GDN_OK) return status;
        std::vector<unsigned char> workspace(bytes);
        status = direction == CAKE_GDN_FORWARD ? cake_gdn_forward(&p, workspace.data(), bytes, nullptr)
                                               : cake_gdn_backward(&p, workspace.data(), bytes, nullptr);
        if (status != CAKE_GDN_OK) return status;
    }
    return CAKE_GDN_OK;
}

const uint32_t kAllFlags = CAKE_GDN_QK_L2NORM | CAKE_GDN_GATE | CAKE_GDN_BETA_SIGMOID | CAKE_GDN_NEG_EIGVAL;

Spec wide_spec() {
    Spec s;
    s.T = 400, s.H = 8, s.HV = 8, s.K = 48, s.V = 64;
    s.flags = kAllFlags;
    s.threads = 1;
    return s;
}

}  // namespace

TEST_CASE("against the recurrence: random shapes, dtypes, layouts and options") {
    Random random(31);
    for (int round = 0; round < 40; ++round) {
        Spec s;
        s.dtype = int(random.integer(0, 3));
        s.gate_dtype = s.dtype != CAKE_GDN_FP64 && random.integer(0, 1) ? int(CAKE_GDN_FP32) : s.dtype;
        s.H = random.integer(1, 2), s.HV = s.H * random.integer(1, 3);
        // From K = 2 on: the normalisation of a single number leaves a gradient of 1e-6 of its terms, lost in fp32.
        s.K = random.integer(2, 40), s.V = random.integer(1, 40);
        s.T = random.integer(1, 150);
        s.layout = Layout(random.integer(0, 3));
        s.flags = uint32_t(random.integer(0, 1)) * CAKE_GDN_QK_L2NORM | uint32_t(random.integer(0, 1)) * CAKE_GDN_GATE |
                  uint32_t(random.integer(0, 1)) * CAKE_GDN_STATE_V_FIRST;
        if (random.integer(0, 1))
            s.flags |= CAKE_GDN_BETA_SIGMOID | uint32_t(random.integer(0, 1)) * CAKE_GDN_NEG_EIGVAL;
        s.initial_state = random.integer(0, 3) != 0;
        s.save_state = random.integer(0, 1);
        s.dt_bias = random.integer(0, 1);
        s.seed = random.bits();
        if (random.integer(0, 1)) {
            s.offsets = {0};
            while (s.offsets.back() < s.T) {
                s.offsets.push_back(std::min(s.T, s.offsets.back() + random.integer(0, 90)));
            }
            s.offset_dtype = random.integer(0, 1) ? CAKE_GDN_INT32 : CAKE_GDN_INT64;
        } else {
            s.B = random.integer(1, 2);
        }
        Case call(s);
        const Bytes inputs = call.input_bytes();
        run_unit(unit_under_test(), call, 2);
        CAPTURE(round);
        CAPTURE(s.dtype);
        // 16-bit g, beta gradients and states round in their own dtype.
        check_results(call, std::max(tolerance(s.dtype), tolerance(s.gate_dtype)));
        CHECK(call.guards_intact());
        CHECK(call.input_bytes() == inputs);
    }
}

TEST_CASE("against the recurrence: head sizes around vectors and lengths around chunks") {
    for (int dtype : {CAKE_GDN_FP32, CAKE_GDN_FP64}) {
        for (int64_t size : {1, 7, 8, 9, 15, 16, 17, 33}) {
            for (int64_t T : {1, 3, 63, 64, 65, 129}) {
                Spec s;
                s.dtype = dtype, s.gate_dtype = dtype;
                s.K = size, s.V = 34 - size, s.T = T, s.HV = 1;
                s.save_state = T % 2;
                Case call(s);
                run_unit(unit_under_test(), call, 1);
                CAPTURE(size);
                CAPTURE(T);
                check_results(call, tolerance(dtype));
            }
        }
    }
}

TEST_CASE("resets: g = -inf gives finite results") {
    for (int dtype : {CAKE_GDN_FP32, CAKE_GDN_FP64}) {
        Spec s;
        s.dtype = dtype, s.gate_dtype = dtype;
        s.T = 200, s.reset_share = 0.15, s.HV = 4, s.H = 2;
        Case call(s);
        run_unit(unit_under_test(), call, 1);
        check_results(call, tolerance(dtype));
        int resets = 0;
        for (int64_t i = 0; i < call.g.count(); ++i) {
            if (!std::isinf(call.g.get(i))) continue;
            ++resets;
            CHECK(call.dg.get(i) == 0.0);
        }
        CHECK(resets > 50);
    }
}

TEST_CASE("resets: what comes before one has a gradient of exactly zero from what comes after") {
    for (int64_t at : {1, 63, 64, 100}) {
        Spec s;
        s.T = 150, s.H = 2, s.HV = 4, s.save_state = at % 2;
        Case call(s);
        for (int64_t t = 0; t <= at; ++t) {
            for (int64_t hv = 0; hv < s.HV; ++hv) {
                if (t == at) call.g.set(t * s.HV + hv, -std::numeric_limits<double>::infinity());
                for (int64_t j = 0; j < s.V && t < at; ++j) call.d_o.set((t * s.HV + hv) * s.V + j, 0);
            }
        }
        run_unit(unit_under_test(), call, 1);
        check_results(call, tolerance(s.dtype));
        const auto not_zero = [](const Tensor &t, int64_t count) {
            int64_t wrong = 0;
            for (int64_t i = 0; i < count; ++i) wrong += !(t.get(i) == 0.0);
            return wrong;
        };
        CAPTURE(at);
        CHECK(not_zero(call.dh0, call.dh0.count()) == 0);
        CHECK(not_zero(call.dq, at * s.H * s.K) == 0);
        CHECK(not_zero(call.dk, at * s.H * s.K) == 0);
        CHECK(not_zero(call.dv, at * s.HV * s.V) == 0);
        CHECK(not_zero(call.dbeta, at * s.HV) == 0);
        CHECK(not_zero(call.dg, (at + 1) * s.HV) == 0);
    }
}

TEST_CASE("A_log = -inf and +inf: decay one and decay zero, finite gradients") {
    Spec s;
    s.flags = CAKE_GDN_GATE;
    s.T = 100, s.HV = 3, s.save_state = false;
    Case call(s);
    call.A_log.set(0, -std::numeric_limits<double>::infinity());
    call.A_log.set(1, std::numeric_limits<double>::infinity());
    run_unit(unit_under_test(), call, 1);
    for (const std::vector<double> &values : {call.o.values(), call.dq.values(), call.dk.values(), call.dv.values(),
                                              call.dg.values(), call.dA_log.values(), call.ddt_bias.values()}) {
        for (double x : values) {
            if (!std::isfinite(x)) REQUIRE(std::isfinite(x));
        }
    }
    CHECK(call.dA_log.get(0) == 0.0);
    CHECK(call.dA_log.get(1) == 0.0);
    CHECK(call.dA_log.get(2) != 0.0);
}

TEST_CASE("bits: scratch may hold anything") {
    for (bool save : {true, false}) {
        for (int dtype : {CAKE_GDN_BF16, CAKE_GDN_FP64}) {
            Spec s;
            s.dtype = dtype;
            s.flags = kAllFlags;
            s.T = 150, s.K = 20, s.V = 24, s.save_state = save;
            Case call(s);
            run_unit(unit_under_test(), call, 1, 0x00);
            const Bytes zeros = call.output_bytes();
            for (unsigned char fill : {0xff, 0x7f, 0x01}) {
                run_unit(unit_under_test(), call, 1, fill);
                CHECK(call.output_bytes() == zeros);
            }
        }
    }
}

TEST_CASE("bits: the same for 1 to 8 threads") {
    Case call(wide_spec());
    run_unit(unit_under_test(), call, 1);
    const Bytes one = call.output_bytes();
    for (int threads = 2; threads <= 8; ++threads) {
        run_unit(unit_under_test(), call, threads);
        CAPTURE(threads);
        CHECK(call.output_bytes() == one);
    }
}

TEST_CASE("bits: the same with saved states and with recomputed ones") {
    for (int dtype : {CAKE_GDN_BF16, CAKE_GDN_FP32, CAKE_GDN_FP64}) {
        for (bool packed : {false, true}) {
            Spec s;
            s.dtype = dtype;
            s.flags = kAllFlags;
            s.T = 700;  // 11 chunks: segments of 4, the last one short
            if (packed) s.offsets = {0, 0, 65, 500, 500, 501, 700, 700};
            s.H = 2, s.HV = 4;
            Case saved(s);
            s.save_state = false;
            Case recomputed(s);
            run_unit(unit_under_test(), saved, 1);
            run_unit(unit_under_test(), recomputed, 1);
            Bytes a = saved.output_bytes(), b = recomputed.output_bytes();
            CHECK(!a[2].empty());
            CHECK(b[2].empty());
            a[2].clear();  // h
            CHECK(a == b);
        }
    }
}

TEST_CASE("bits: no initial state is a state of zeros") {
    Spec s;
    s.T = 130;
    s.flags = kAllFlags;
    s.initial_state = false;
    Case absent(s);
    s.initial_state = true;
    Case zeros(s);
    zeros.initial_state.set_values(std::vector<double>(size_t(zeros.initial_state.count()), 0.0));
    // The state's numbers were drawn in between: take the inputs that follow from the other problem.
    zeros.d_o.set_values(absent.d_o.values());
    zeros.dht.set_values(absent.dht.values());
    run_unit(unit_under_test(), absent, 1);
    run_unit(unit_under_test(), zeros, 1);
    CHECK(absent.output_bytes() == zeros.output_bytes());
}

TEST_CASE("70,000 sequences of which most are empty, in runs") {
    Spec s;
    s.H = 1, s.HV = 2, s.K = 3, s.V = 5;
    s.flags = CAKE_GDN_GATE;
    s.offset_dtype = CAKE_GDN_INT32;
    const int64_t N = 70000;
    std::vector<int64_t> full;  // the sequences that have tokens
    s.offsets.assign(size_t(N + 1), 0);
    Random random(32);
    for (int64_t n = 0; n < N; ++n) {
        const bool some = n == 5 || n == N / 2 || n == N - 3 || random.integer(0, 6999) == 0;
        s.offsets[size_t(n + 1)] = s.offsets[size_t(n)] + (some ? random.integer(1, 150) : 0);
        if (some) full.push_back(n);
    }
    s.T = s.offsets.back();
    Case call(s);
    run_unit(unit_under_test(), call, 4);
    CHECK(call.guards_intact());

    // The same without the empty ones: the same bits for those that are left; the empty ones pass their states through.
    Spec t = s;
    t.offsets = {0};
    for (int64_t n : full) t.offsets.push_back(s.offsets[size_t(n + 1)]);
    Case dense(t);
    const int64_t state = s.HV * s.K * s.V;
    for (Tensor Case::*input :
         {&Case::q, &Case::k, &Case::v, &Case::g, &Case::beta, &Case::A_log, &Case::dt_bias, &Case::d_o}) {
        (dense.*input).set_values((call.*input).values());
    }
    for (size_t i = 0; i < full.size(); ++i) {
        for (int64_t e = 0; e < state; ++e) {
            dense.initial_state.set(int64_t(i) * state + e, call.initial_state.get(full[i] * state + e));
            dense.dht.set(int64_t(i) * state + e, call.dht.get(full[i] * state + e));
        }
    }
    run_unit(unit_under_test(), dense, 1);
    for (Tensor Case::*output : {&Case::o, &Case::dq, &Case::dk, &Case::dv, &Case::dg, &Case::dbeta, &Case::h,
                                 &Case::dA_log, &Case::ddt_bias}) {
        CHECK((call.*output).storage() == (dense.*output).storage());
    }
    int64_t wrong = 0;
    size_t next = 0;
    for (int64_t n = 0; n < N; ++n) {
        const bool has_tokens = next < full.size() && full[next] == n;
        for (int64_t e = n * state; e < (n + 1) * state; ++e) {
            const int64_t at = int64_t(next) * state + e - n * state;
            wrong += call.final_state.get(e) != (has_tokens ? dense.final_state.get(at) : call.initial_state.get(e));
            wrong += call.dh0.get(e) != (has_tokens ? dense.dh0.get(at) : call.dht.get(e));
        }
        next += has_tokens;
    }
    CHECK(wrong == 0);
    CHECK(next == full.size());
}

TEST_CASE("bits: a sequence's do not depend on what it is packed with, nor on its place") {
    Spec s;
    s.T = 300, s.offsets = {0, 70, 71, 171, 300};
    s.H = 2, s.HV = 4, s.K = 24, s.V = 20;
    Case packed(s);
    run_unit(unit_under_test(), packed, 2);
    for (size_t n = 0; n + 1 < s.offsets.size(); ++n) {
        Spec alone = s;
        const int64_t begin = s.offsets[n];
        alone.T = s.offsets[n + 1] - begin;
        alone.offsets.clear();
        Case call(alone);
        const auto take = [](Tensor &to, const Tensor &from, int64_t first) {
            for (int64_t i = 0; i < to.count(); ++i) to.set(i, from.get(first + i));
        };
        const int64_t keys = begin * s.H * s.K, values = begin * s.HV * s.V, gates = begin * s.HV;
        const int64_t states = int64_t(n) * s.HV * s.K * s.V;
        take(call.q, packed.q, keys), take(call.k, packed.k, keys), take(call.v, packed.v, values);
        take(call.g, packed.g, gates), take(call.beta, packed.beta, gates), take(call.d_o, packed.d_o, values);
        take(call.initial_state, packed.initial_state, states), take(call.dht, packed.dht, states);
        run_unit(unit_under_test(), call, 1);
        const auto differing = [](const Tensor &a, const Tensor &whole, int64_t first) {
            int64_t count = 0;
            for (int64_t i = 0; i < a.count(); ++i) count += !(a.get(i) == whole.get(first + i));
            return count;
        };
        CAPTURE(n);
        CHECK(differing(call.o, packed.o, values) == 0);
        CHECK(differing(call.dq, packed.dq, keys) == 0);
        CHECK(differing(call.dk, packed.dk, keys) == 0);
        CHECK(differing(call.dv, packed.dv, values) == 0);
        CHECK(differing(call.dg, packed.dg, gates) == 0);
        CHECK(differing(call.dbeta, packed.dbeta, gates) == 0);
        CHECK(differing(call.final_state, packed.final_state, states) == 0);
        CHECK(differing(call.dh0, packed.dh0, states) == 0);
    }
}

TEST_CASE("library: the same bits for every num_threads, and the unit's own") {
    Spec s = wide_spec();
    Case direct(s);
    run_unit(cpu::selected_unit(), direct, 1);
    const Bytes wanted = direct.output_bytes();
    for (int threads : {1, 2, 3, 8, 1000}) {
        s.threads = threads;
        Case call(s);
        CAPTURE(threads);
        CHECK(call_library(call) == CAKE_GDN_OK);
        CHECK(call.output_bytes() == wanted);
    }
}

TEST_CASE("library: many callers at once get the same bits") {
    Spec s;
    s.T = 200, s.H = 2, s.HV = 4, s.K = 32, s.V = 32;
    s.flags = kAllFlags;
    s.threads = 3;
    Case alone(s);
    REQUIRE(call_library(alone) == CAKE_GDN_OK);
    const Bytes wanted = alone.output_bytes();
    std::vector<int> wrong(6, 0);
    std::vector<std::thread> callers;
    for (size_t i = 0; i < wrong.size(); ++i) {
        callers.emplace_back([&, i] {
            for (int round = 0; round < 3; ++round) {
                Case mine(s);
                wrong[i] += call_library(mine) != CAKE_GDN_OK || mine.output_bytes() != wanted;
            }
        });
    }
    for (std::thread &caller : callers) caller.join();
    for (int count : wrong) CHECK(count == 0);
}

TEST_CASE("library: rows of h that no chunk owns are zero") {
    Spec s;
    s.T = 400;
    s.offsets = {0, 60, 63, 200, 200, 210, 400};  // two sequences have more than one chunk
    Case call(s);
    REQUIRE(call_library(call) == CAKE_GDN_OK);
    std::vector<bool> owned(size_t(cake_gdn_state_slots(1, s.T)), false);
    for (size_t n = 0; n + 1 < s.offsets.size(); ++n) {
        for (int64_t t = s.offsets[n] + 64; t < s.offsets[n + 1]; t += 64) owned[size_t(t / 64 - 1)] = true;
    }
    const int64_t row = s.HV * s.K * s.V;
    int64_t unowned = 0;
    for (size_t slot = 0; slot < owned.size(); ++slot) {
        unowned += !owned[slot];
        int64_t zeros = 0;
        for (int64_t e = 0; e < row; ++e) zeros += call.h.get(int64_t(slot) * row + e) == 0.0;
        CAPTURE(slot);
        CHECK((zeros == row) == !owned[slot]);
    }
    CHECK(unowned > 0);
}

#if !defined(__SANITIZE_THREAD__)
TEST_CASE("library: the caller's rounding mode neither matters nor changes") {
    Case call(wide_spec());
    REQUIRE(call_library(call) == CAKE_GDN_OK);
    const Bytes wanted = call.output_bytes();
    call.forget_outputs();
    std::fesetround(FE_UPWARD);
    const cake_gdn_status status = call_library(call);
    const int mode = std::fegetround();
    std::fesetround(FE_TONEAREST);
    CHECK(status == CAKE_GDN_OK);
    CHECK(mode == FE_UPWARD);
    CHECK(call.output_bytes() == wanted);
}

#if defined(__x86_64__)
TEST_CASE("library: a caller that flushes denormals gets the same bits") {
    Spec s;
    s.T = 100;
    Case call(s);
    // States near the smallest normal number: their products are denormal.
    for (int64_t i = 0; i < call.initial_state.count(); ++i)
        call.initial_state.set(i, call.initial_state.get(i) * 1e-37);
    for (int64_t i = 0; i < call.v.count(); ++i) call.v.set(i, call.v.get(i) * 1e-37);
    REQUIRE(call_library(call) == CAKE_GDN_OK);
    const Bytes wanted = call.output_bytes();
    call.forget_outputs();
    constexpr unsigned kFlushBits = 0x8040;  // flush to zero, denormals are zero
    const unsigned before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(before | kFlushBits);
    const cake_gdn_status status = call_library(call);
    const unsigned after = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(before);
    CHECK(status == CAKE_GDN_OK);
    CHECK((after & kFlushBits) == kFlushBits);
    CHECK(call.output_bytes() == wanted);
}
#endif
#endif
