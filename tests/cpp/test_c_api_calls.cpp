// Whole calls through the C interface: right results, and not a byte written or trusted outside the tensors.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "support.hpp"

using namespace cake_gdn_test;

namespace {

// A workspace of exactly `bytes` bytes that starts `shift` bytes after a multiple of 64, between guards.
class Workspace {
public:
    Workspace(size_t bytes, size_t shift) : bytes_(bytes), memory_(bytes + 2 * kGuard + 64 + shift, kPattern) {
        start_ = kGuard;
        while (reinterpret_cast<uintptr_t>(memory_.data() + start_) % 64 != 0) ++start_;
        start_ += shift;
        std::fill_n(memory_.begin() + int64_t(start_), bytes, 0xff);
    }
    void *data() { return memory_.data() + start_; }
    bool guards_intact() const {
        for (size_t i = 0; i < memory_.size(); ++i) {
            if ((i < start_ || i >= start_ + bytes_) && memory_[i] != kPattern) return false;
        }
        return true;
    }

private:
    static constexpr size_t kGuard = 512;
    static constexpr unsigned char kPattern = 0xa5;
    size_t bytes_, start_ = 0;
    std::vector<unsigned char> memory_;
};

void run(const cake_gdn_problem &p, cake_gdn_direction direction, size_t shift) {
    size_t bytes = 0;
    REQUIRE(cake_gdn_workspace_size(&p, direction, &bytes) == CAKE_GDN_OK);
    Workspace workspace(bytes, shift);
    const cake_gdn_status status = direction == CAKE_GDN_FORWARD
                                       ? cake_gdn_forward(&p, workspace.data(), bytes, nullptr)
                                       : cake_gdn_backward(&p, workspace.data(), bytes, nullptr);
    CAPTURE(std::string(cake_gdn_last_error()));
    REQUIRE(status == CAKE_GDN_OK);
    CHECK(workspace.guards_intact());
}

void run_both(Case &call, size_t shift) {
    run(call.problem(CAKE_GDN_FORWARD), CAKE_GDN_FORWARD, shift);
    run(call.problem(CAKE_GDN_BACKWARD), CAKE_GDN_BACKWARD, shift);
}

void check_against_recurrence(const Case &call, double limit) {
    const Results got = call.results(), wanted = recurrence(call.inputs());
    const struct {
        const char *name;
        const std::vector<double> &got, &wanted;
    } all[] = {{"o", got.o, wanted.o},
               {"final_state", got.final_state, wanted.final_state},
               {"dq", got.dq, wanted.dq},
               {"dk", got.dk, wanted.dk},
               {"dv", got.dv, wanted.dv},
               {"dg", got.dg, wanted.dg},
               {"dbeta", got.dbeta, wanted.dbeta},
               {"dA_log", got.dA_log, wanted.dA_log},
               {"ddt_bias", got.ddt_bias, wanted.ddt_bias},
               {"dh0", got.dh0, wanted.dh0}};
    for (const auto &one : all) {
        CAPTURE(std::string(one.name));
        const double e = error(one.got, one.wanted);
        CHECK(e >= 0);
        CHECK(e < limit);
    }
}

double tolerance(int dtype) {
    return dtype == CAKE_GDN_BF16 ? 6e-3 : dtype == CAKE_GDN_FP16 ? 8e-4 : dtype == CAKE_GDN_FP32 ? 2e-5 : 1e-11;
}

}  // namespace

TEST_CASE("forward and backward: every dtype, packed and dense, from any workspace address, inside red zones") {
    size_t shift = 0;
    for (int dtype : {CAKE_GDN_BF16, CAKE_GDN_FP16, CAKE_GDN_FP32, CAKE_GDN_FP64}) {
        for (Layout layout : {Layout::contiguous, Layout::spread, Layout::permuted, Layout::reversed}) {
            for (bool packed : {false, true}) {
                Spec s;
                s.dtype = dtype, s.layout = layout;
                s.gate_dtype = dtype == CAKE_GDN_FP64 ? CAKE_GDN_FP64 : CAKE_GDN_FP32;
                s.B = packed ? 1 : 2, s.T = 140, s.H = 2, s.HV = 4, s.K = 19, s.V = 11;
                if (packed) s.offsets = {0, 0, 1, 66, 66, 139, 140, 140};
                s.flags = CAKE_GDN_QK_L2NORM | CAKE_GDN_GATE | CAKE_GDN_BETA_SIGMOID | CAKE_GDN_NEG_EIGVAL |
                          (layout == Layout::spread ? uint32_t(CAKE_GDN_STATE_V_FIRST) : 0u) |
                          (layout == Layout::permuted ? uint32_t(CAKE_GDN_BATCH_INVARIANT) : 0u);
                s.save_state = layout != Layout::permuted;
                Case call(s);
                const auto inputs = call.input_bytes();
                shift = (shift + 13) % 64;
                CAPTURE(dtype);
                CAPTURE(int(layout));
                CAPTURE(packed);
                CAPTURE(shift);
                run_both(call, shift);
                check_against_recurrence(call, tolerance(dtype));
                CHECK(call.guards_intact());
                CHECK(call.input_bytes() == inputs);
            }
        }
    }
}

TEST_CASE("the workspace's address and what it holds decide no bit") {
    Spec s;
    s.T = 100, s.flags = CAKE_GDN_GATE;
    Case call(s);
    run_both(call, 0);
    const auto wanted = call.output_bytes();
    for (size_t shift = 1; shift < 64; shift += 7) {
        call.forget_outputs();
        run_both(call, shift);
        CHECK(call.output_bytes() == wanted);
    }
}

TEST_CASE("outputs that are not given are not needed, and the others keep their bits") {
    Spec s;
    s.T = 130, s.H = 1, s.HV = 3, s.flags = CAKE_GDN_GATE | CAKE_GDN_QK_L2NORM;
    Case whole(s);
    run_both(whole, 0);
    const auto wanted = whole.output_bytes();
    using Member = cake_gdn_tensor cake_gdn_problem::*;
    const Member outputs[] = {&cake_gdn_problem::dq,       &cake_gdn_problem::dk,    &cake_gdn_problem::dv,
                              &cake_gdn_problem::dg,       &cake_gdn_problem::dbeta, &cake_gdn_problem::dA_log,
                              &cake_gdn_problem::ddt_bias, &cake_gdn_problem::dh0};
    for (size_t kept = 0; kept < std::size(outputs); ++kept) {
        Case call(s);
        run(call.problem(CAKE_GDN_FORWARD), CAKE_GDN_FORWARD, 0);
        cake_gdn_problem p = call.problem(CAKE_GDN_BACKWARD);
        for (size_t i = 0; i < std::size(outputs); ++i) {
            if (i != kept) p.*outputs[i] = cake_gdn_tensor{};
        }
        run(p, CAKE_GDN_BACKWARD, 0);
        const auto got = call.output_bytes();
        CAPTURE(kept);
        for (size_t i = 0; i < std::size(outputs); ++i) {
            // After o, final_state and h.
            if (i == kept) {
                CHECK(got[3 + i] == wanted[3 + i]);
            } else {
                const auto all_ff = [](unsigned char byte) { return byte == 0xff; };
                CHECK(std::all_of(got[3 + i].begin(), got[3 + i].end(), all_ff));
            }
        }
    }
    Case bare(s);
    cake_gdn_problem p = bare.problem(CAKE_GDN_FORWARD);
    p.final_state = p.h = cake_gdn_tensor{};
    p.slots = 0;
    run(p, CAKE_GDN_FORWARD, 0);
    CHECK(bare.output_bytes()[0] == wanted[0]);
}

TEST_CASE("absent gradients of the outputs are zeros") {
    Spec s;
    s.T = 90, s.flags = CAKE_GDN_GATE;
    for (bool drop_d_o : {true, false}) {
        Case absent(s), zeros(s);
        Tensor &dropped = drop_d_o ? zeros.d_o : zeros.dht;
        dropped.set_values(std::vector<double>(size_t(dropped.count()), 0.0));
        run_both(zeros, 0);
        run(absent.problem(CAKE_GDN_FORWARD), CAKE_GDN_FORWARD, 0);
        cake_gdn_problem p = absent.problem(CAKE_GDN_BACKWARD);
        (drop_d_o ? p.d_o : p.dht) = cake_gdn_tensor{};
        run(p, CAKE_GDN_BACKWARD, 0);
        CHECK(absent.output_bytes() == zeros.output_bytes());
    }
}

TEST_CASE("sizes of zero") {
    // No tokens: states pass through, gradients of shared parameters are zero.
    Spec s;
    s.B = 2, s.T = 0, s.flags = CAKE_GDN_GATE;
    Case none(s);
    run_both(none, 5);
    CHECK(none.final_state.values() == none.initial_state.values());
    CHECK(none.dh0.values() == none.dht.values());
    for (const Tensor *t : {&none.dA_log, &none.ddt_bias}) {
        for (double x : t->values()) CHECK(x == 0.0);
    }
    CHECK(none.guards_intact());

    // The same with null pointers and unknown dtypes in what has no element.
    cake_gdn_problem p = none.problem(CAKE_GDN_FORWARD);
    for (cake_gdn_tensor *t : {&p.q, &p.k, &p.v, &p.g, &p.beta, &p.o}) *t = cake_gdn_tensor{};
    none.forget_outputs();
    run(p, CAKE_GDN_FORWARD, 0);
    CHECK(none.final_state.values() == none.initial_state.values());

    // Packed without tokens, without sequences; a batch of nothing.
    s.B = 1;
    for (const std::vector<int64_t> &offsets : {std::vector<int64_t>{0}, std::vector<int64_t>{0, 0, 0}}) {
        s.offsets = offsets;
        Case call(s);
        run_both(call, 1);
        CHECK(call.final_state.values() == call.initial_state.values());
    }
    s.offsets.clear();
    s.B = 0, s.T = 70;
    Case empty(s);
    run_both(empty, 1);
    for (double x : empty.dA_log.values()) CHECK(x == 0.0);
}

TEST_CASE("an output without elements may have any strides") {
    Spec s;
    s.B = 2, s.T = 0;
    Case call(s);
    cake_gdn_problem p = call.problem(CAKE_GDN_FORWARD);
    for (int64_t &stride : p.o.stride) stride = 0;
    run(p, CAKE_GDN_FORWARD, 0);
}

TEST_CASE("the largest head, and the largest group") {
    Spec s;
    s.T = 66, s.H = 1, s.HV = 1, s.K = 512, s.V = 512, s.save_state = false;
    s.threads = 1;
    Case large(s);
    run_both(large, 3);
    check_against_recurrence(large, 2e-5);
    s.K = 5, s.V = 6, s.HV = 33;
    Case grouped(s);
    run_both(grouped, 3);
    check_against_recurrence(grouped, 2e-5);
}

TEST_CASE("the size of the workspace reads no tensor but the offsets") {
    Spec s;
    s.T = 200, s.offsets = {0, 100, 200};
    Case call(s);
    for (cake_gdn_direction direction : {CAKE_GDN_FORWARD, CAKE_GDN_BACKWARD}) {
        cake_gdn_problem p = call.problem(direction);
        size_t wanted = 0, got = 0;
        REQUIRE(cake_gdn_workspace_size(&p, direction, &wanted) == CAKE_GDN_OK);
        // Addresses that no process has: every access would fault. Only offsets on the host are read, to be checked.
        unsigned char *nowhere = nullptr;
        for (cake_gdn_tensor *t : {&p.q, &p.k, &p.v, &p.g, &p.beta, &p.initial_state, &p.o, &p.final_state, &p.h,
                                   &p.d_o, &p.dht, &p.dq, &p.dk, &p.dv, &p.dg, &p.dbeta, &p.dh0}) {
            if (t->data) t->data = reinterpret_cast<void *>(reinterpret_cast<uintptr_t>(nowhere) + 64);
        }
        CHECK(cake_gdn_workspace_size(&p, direction, &got) == CAKE_GDN_OK);
        CHECK(got == wanted);
    }
}
