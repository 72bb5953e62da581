// The C interface refuses what it must, with the right status and a message that names the field.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "support.hpp"

using namespace cake_gdn_test;

namespace {

using Change = std::function<void(cake_gdn_problem &)>;

struct Refusal {
    const char *what;
    Change change;
    cake_gdn_status status;
    const char *named;  // in the message
};

Spec full_spec() {
    Spec s;
    s.B = 2, s.T = 130, s.H = 2, s.HV = 4, s.K = 8, s.V = 4;
    s.flags = CAKE_GDN_GATE | CAKE_GDN_QK_L2NORM;
    return s;
}
Spec packed_spec() {
    Spec s = full_spec();
    s.B = 1, s.offsets = {0, 30, 30, 130};
    return s;
}

std::string last_error() { return cake_gdn_last_error(); }

// Runs a direction on scratch of its own size; the size call must agree with the run.
cake_gdn_status run(const cake_gdn_problem &p, cake_gdn_direction direction) {
    size_t bytes = 0;
    const cake_gdn_status status = cake_gdn_workspace_size(&p, direction, &bytes);
    const std::string message = last_error();
    std::vector<unsigned char> workspace(status == CAKE_GDN_OK ? bytes : size_t(1) << 20);
    const cake_gdn_status ran = direction == CAKE_GDN_FORWARD
                                    ? cake_gdn_forward(&p, workspace.data(), workspace.size(), nullptr)
                                    : cake_gdn_backward(&p, workspace.data(), workspace.size(), nullptr);
    CHECK(ran == status);
    CHECK(last_error() == message);
    return ran;
}

void check_refusals(const Spec &spec, cake_gdn_direction direction, const std::vector<Refusal> &refusals) {
    Case call(spec);
    REQUIRE(run(call.problem(direction), direction) == CAKE_GDN_OK);
    call.forget_outputs();
    const auto untouched = call.output_bytes();
    for (const Refusal &r : refusals) {
        cake_gdn_problem p = call.problem(direction);
        r.change(p);
        CAPTURE(std::string(r.what));
        CHECK(run(p, direction) == r.status);
        CAPTURE(last_error());
        CHECK(last_error().find(r.named) != std::string::npos);
        // A later success leaves no message behind.
        CHECK(run(Case(spec).problem(direction), direction) == CAKE_GDN_OK);
        CHECK(last_error().empty());
    }
    CHECK(call.output_bytes() == untouched);
}

using Member = cake_gdn_tensor cake_gdn_problem::*;
struct Named {
    const char *name;
    Member member;
};

const Named kForwardInputs[] = {{"q", &cake_gdn_problem::q},       {"k", &cake_gdn_problem::k},
                                {"v", &cake_gdn_problem::v},       {"g", &cake_gdn_problem::g},
                                {"beta", &cake_gdn_problem::beta}, {"A_log", &cake_gdn_problem::A_log}};
const Named kOutputs[] = {{"dq", &cake_gdn_problem::dq},
                          {"dk", &cake_gdn_problem::dk},
                          {"dv", &cake_gdn_problem::dv},
                          {"dg", &cake_gdn_problem::dg},
                          {"dbeta", &cake_gdn_problem::dbeta},
                          {"dA_log", &cake_gdn_problem::dA_log},
                          {"ddt_bias", &cake_gdn_problem::ddt_bias},
                          {"dh0", &cake_gdn_problem::dh0}};

}  // namespace

TEST_CASE("null pointers: problem, sizes, workspace, every required field") {
    size_t bytes = 7;
    CHECK(cake_gdn_workspace_size(nullptr, CAKE_GDN_FORWARD, &bytes) == CAKE_GDN_INVALID_ARGUMENT);
    CHECK(last_error().find("problem") != std::string::npos);
    CHECK(cake_gdn_forward(nullptr, nullptr, 0, nullptr) == CAKE_GDN_INVALID_ARGUMENT);
    CHECK(cake_gdn_backward(nullptr, nullptr, 0, nullptr) == CAKE_GDN_INVALID_ARGUMENT);
    CHECK(bytes == 7);
    Case call(full_spec());
    for (cake_gdn_direction direction : {CAKE_GDN_FORWARD, CAKE_GDN_BACKWARD}) {
        const cake_gdn_problem p = call.problem(direction);
        CHECK(cake_gdn_workspace_size(&p, direction, nullptr) == CAKE_GDN_INVALID_ARGUMENT);
        CHECK(last_error().find("bytes") != std::string::npos);
        REQUIRE(cake_gdn_workspace_size(&p, direction, &bytes) == CAKE_GDN_OK);
        const auto go = direction == CAKE_GDN_FORWARD ? cake_gdn_forward : cake_gdn_backward;
        CHECK(go(&p, nullptr, bytes, nullptr) == CAKE_GDN_INVALID_ARGUMENT);
        CHECK(last_error().find("workspace") != std::string::npos);
        CHECK(go(&p, nullptr, 0, nullptr) != CAKE_GDN_OK);
        std::vector<unsigned char> workspace(bytes);
        CHECK(go(&p, workspace.data(), bytes - 1, nullptr) == CAKE_GDN_WORKSPACE_TOO_SMALL);
        CHECK(last_error().find("workspace") != std::string::npos);
        CHECK(last_error().find(std::to_string(bytes)) != std::string::npos);
        CHECK(go(&p, workspace.data(), 0, nullptr) == CAKE_GDN_WORKSPACE_TOO_SMALL);
        CHECK(go(&p, workspace.data(), bytes, nullptr) == CAKE_GDN_OK);

        std::vector<Refusal> refusals;
        for (const Named &field : kForwardInputs) {
            const Member member = field.member;
            refusals.push_back({field.name, [member](cake_gdn_problem &x) { (x.*member).data = nullptr; },
                                CAKE_GDN_INVALID_ARGUMENT, field.name});
        }
        if (direction == CAKE_GDN_FORWARD) {
            refusals.push_back(
                {"o", [](cake_gdn_problem &x) { x.o.data = nullptr; }, CAKE_GDN_INVALID_ARGUMENT, "o is NULL"});
        }
        check_refusals(full_spec(), direction, refusals);
    }
}

TEST_CASE("struct_size of another version") {
    Case call(full_spec());
    for (size_t size : {size_t(0), size_t(8), sizeof(cake_gdn_problem) - 8, sizeof(cake_gdn_problem) + 8, ~size_t(0)}) {
        check_refusals(full_spec(), CAKE_GDN_FORWARD,
                       {{"size", [size](cake_gdn_problem &p) { p.struct_size = size; }, CAKE_GDN_INVALID_ARGUMENT,
                         "struct_size"}});
    }
    // Nothing beyond the size is read of a struct that says it is smaller.
    std::vector<unsigned char> small(sizeof(size_t));
    const size_t bytes = small.size();
    std::memcpy(small.data(), &bytes, sizeof bytes);
    CHECK(cake_gdn_forward(reinterpret_cast<const cake_gdn_problem *>(small.data()), nullptr, 0, nullptr) ==
          CAKE_GDN_INVALID_ARGUMENT);
}

TEST_CASE("options: backend, direction, threads, plan, flags, scale") {
    const auto nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
    for (cake_gdn_direction direction : {CAKE_GDN_FORWARD, CAKE_GDN_BACKWARD}) {
        check_refusals(
            full_spec(), direction,
            {{"backend 2", [](cake_gdn_problem &p) { p.backend = 2; }, CAKE_GDN_INVALID_ARGUMENT, "backend"},
             {"backend -1", [](cake_gdn_problem &p) { p.backend = -1; }, CAKE_GDN_INVALID_ARGUMENT, "backend"},
#if !defined(CAKE_GDN_WITH_CUDA)
             {"cuda", [](cake_gdn_problem &p) { p.backend = CAKE_GDN_CUDA; }, CAKE_GDN_UNSUPPORTED, "backend"},
#endif
             {"threads 0", [](cake_gdn_problem &p) { p.num_threads = 0; }, CAKE_GDN_INVALID_ARGUMENT, "num_threads"},
             {"threads -4", [](cake_gdn_problem &p) { p.num_threads = -4; }, CAKE_GDN_INVALID_ARGUMENT, "num_threads"},
             {"a pinned plan", [](cake_gdn_problem &p) { p.plan = "segment=8"; }, CAKE_GDN_INVALID_ARGUMENT, "plan"},
             {"flag 64", [](cake_gdn_problem &p) { p.flags |= 64; }, CAKE_GDN_INVALID_ARGUMENT, "flags"},
             {"flag 2^31", [](cake_gdn_problem &p) { p.flags |= 1u << 31; }, CAKE_GDN_INVALID_ARGUMENT, "flags"},
             {"negative eigenvalues alone", [](cake_gdn_problem &p) { p.flags |= CAKE_GDN_NEG_EIGVAL; },
              CAKE_GDN_INVALID_ARGUMENT, "CAKE_GDN_NEG_EIGVAL"},
             {"A_log without the gate", [](cake_gdn_problem &p) { p.flags = 0; }, CAKE_GDN_INVALID_ARGUMENT, "A_log"},
             {"dt_bias without the gate", [](cake_gdn_problem &p) { p.flags = 0, p.A_log.data = nullptr; },
              CAKE_GDN_INVALID_ARGUMENT, "dt_bias"},
             {"scale NaN", [=](cake_gdn_problem &p) { p.scale = nan; }, CAKE_GDN_INVALID_ARGUMENT, "scale"},
             {"scale inf", [=](cake_gdn_problem &p) { p.scale = infinity; }, CAKE_GDN_INVALID_ARGUMENT, "scale"},
             {"scale -inf", [=](cake_gdn_problem &p) { p.scale = -infinity; }, CAKE_GDN_INVALID_ARGUMENT, "scale"}});
    }
#if !defined(__SANITIZE_ADDRESS__)
    // A caller in C may pass any number; in C++ the conversion itself is undefined, and the sanitizers say so.
    Case call(full_spec());
    const cake_gdn_problem p = call.problem(CAKE_GDN_FORWARD);
    size_t bytes = 0;
    CHECK(cake_gdn_workspace_size(&p, cake_gdn_direction(2), &bytes) == CAKE_GDN_INVALID_ARGUMENT);
    CHECK(last_error().find("direction") != std::string::npos);
#endif
}

TEST_CASE("sizes: negative, zero heads, multiples, limits, overflow") {
    const auto bad = CAKE_GDN_INVALID_ARGUMENT;
    std::vector<Refusal> refusals;
    const struct {
        const char *name;
        int64_t cake_gdn_problem::*size;
        int64_t least;
    } sizes[] = {{"B", &cake_gdn_problem::B, 0}, {"T", &cake_gdn_problem::T, 0},   {"N", &cake_gdn_problem::N, 0},
                 {"H", &cake_gdn_problem::H, 1}, {"HV", &cake_gdn_problem::HV, 1}, {"K", &cake_gdn_problem::K, 1},
                 {"V", &cake_gdn_problem::V, 1}};
    for (const auto &s : sizes) {
        const auto size = s.size;
        for (int64_t value : {s.least - 1, int64_t(-64), std::numeric_limits<int64_t>::min()}) {
            refusals.push_back({s.name, [size, value](cake_gdn_problem &p) { p.*size = value; }, bad, s.name});
        }
    }
    const int64_t top = std::numeric_limits<int64_t>::max();
    refusals.insert(refusals.end(),
                    {{"HV below H", [](cake_gdn_problem &p) { p.HV = 1; }, bad, "HV"},
                     {"HV no multiple", [](cake_gdn_problem &p) { p.HV = 5; }, bad, "HV"},
                     {"K 513", [](cake_gdn_problem &p) { p.K = 513; }, CAKE_GDN_UNSUPPORTED, "K is 513"},
                     {"V 513", [](cake_gdn_problem &p) { p.V = 513; }, CAKE_GDN_UNSUPPORTED, "V is 513"},
                     {"K max", [=](cake_gdn_problem &p) { p.K = top; }, CAKE_GDN_UNSUPPORTED, "K"},
                     {"T max", [=](cake_gdn_problem &p) { p.T = top; }, bad, "T"},
                     {"B max", [=](cake_gdn_problem &p) { p.B = p.N = top; }, bad, "B"},
                     {"B T overflow", [](cake_gdn_problem &p) { p.B = p.N = p.T = int64_t(1) << 33; }, bad, "B"},
                     {"N not B", [](cake_gdn_problem &p) { p.N = 1; }, bad, "N"},
                     {"slots one off", [](cake_gdn_problem &p) { p.slots += 1; }, bad, "slots"},
                     {"slots zero", [](cake_gdn_problem &p) { p.slots = 0; }, bad, "slots"},
                     {"slots negative", [](cake_gdn_problem &p) { p.slots = -1; }, bad, "slots"},
                     {"slots without h", [](cake_gdn_problem &p) { p.h.data = nullptr; }, bad, "slots"}});
    check_refusals(full_spec(), CAKE_GDN_FORWARD, refusals);
    check_refusals(full_spec(), CAKE_GDN_BACKWARD, refusals);
}

TEST_CASE("sizes without tokens whose scratch no machine can address") {
    for (cake_gdn_direction direction : {CAKE_GDN_FORWARD, CAKE_GDN_BACKWARD}) {
        for (int64_t N : {0, 1}) {
            for (int64_t HV :
                 {int64_t(1) << 48, int64_t(1) << 56, int64_t(1) << 61, std::numeric_limits<int64_t>::max()}) {
                cake_gdn_problem p{};
                p.struct_size = sizeof p;
                p.num_threads = 64;
                p.B = p.N = N, p.H = 1, p.HV = HV, p.K = p.V = 1;
                size_t bytes = 0;
                const cake_gdn_status status = cake_gdn_workspace_size(&p, direction, &bytes);
                CAPTURE(HV);
                CAPTURE(N);
                if (status == CAKE_GDN_OK) {
                    CHECK(bytes > size_t(HV) * sizeof(float));
                } else {
                    CHECK((status == CAKE_GDN_INVALID_ARGUMENT || status == CAKE_GDN_OUT_OF_MEMORY));
                    CHECK(!last_error().empty());
                }
            }
        }
    }
}

TEST_CASE("strides whose offsets do not fit in 64 bits") {
    std::vector<Refusal> refusals;
    for (const Named &field : kForwardInputs) {
        const Member member = field.member;
        for (int64_t stride : {std::numeric_limits<int64_t>::max() / 2, std::numeric_limits<int64_t>::min()}) {
            refusals.push_back({field.name,
                                [=](cake_gdn_problem &p) { (p.*member).stride[field.name[0] == 'A' ? 0 : 1] = stride; },
                                CAKE_GDN_INVALID_ARGUMENT, field.name});
        }
    }
    check_refusals(full_spec(), CAKE_GDN_FORWARD, refusals);
}

TEST_CASE("dtypes of every field") {
    const auto bad = CAKE_GDN_INVALID_ARGUMENT;
    for (cake_gdn_direction direction : {CAKE_GDN_FORWARD, CAKE_GDN_BACKWARD}) {
        std::vector<Refusal> refusals;
        const auto add = [&](const char *name, Member member, std::vector<int> dtypes) {
            for (int dtype : dtypes) {
                refusals.push_back({name, [=](cake_gdn_problem &p) { (p.*member).dtype = dtype; }, bad, name});
            }
        };
        const std::vector<int> never{CAKE_GDN_INT32, CAKE_GDN_INT64, 6, -1, 1 << 30};
        for (const Named &field : kForwardInputs) add(field.name, field.member, never);
        add("dt_bias", &cake_gdn_problem::dt_bias, never);
        add("initial_state", &cake_gdn_problem::initial_state, never);
        // q, k, v alike; the state's and the results' types follow.
        const std::vector<int> other{CAKE_GDN_BF16, CAKE_GDN_FP16, CAKE_GDN_FP64, CAKE_GDN_INT32, 6, -1};
        add("k", &cake_gdn_problem::k, other);
        add("v", &cake_gdn_problem::v, other);
        add("h", &cake_gdn_problem::h, other);
        if (direction == CAKE_GDN_FORWARD) {
            add("o", &cake_gdn_problem::o, other);
            add("final_state", &cake_gdn_problem::final_state, other);
        } else {
            add("d_o", &cake_gdn_problem::d_o, never);
            add("dht", &cake_gdn_problem::dht, never);
            for (const Named &field : kOutputs) {
                const bool any =
                    field.name[1] == 'g' || field.name[1] == 'b' || field.name[1] == 'A' || field.name[2] == 't';
                add(field.name, field.member, any ? never : other);
            }
        }
        check_refusals(full_spec(), direction, refusals);
    }
    Spec wide = full_spec();
    wide.dtype = CAKE_GDN_FP64;
    check_refusals(wide, CAKE_GDN_FORWARD,
                   {{"o", [](cake_gdn_problem &p) { p.o.dtype = CAKE_GDN_FP32; }, bad, "o has dtype"},
                    {"h", [](cake_gdn_problem &p) { p.h.dtype = CAKE_GDN_FP32; }, bad, "h"},
                    {"final", [](cake_gdn_problem &p) { p.final_state.dtype = CAKE_GDN_FP32; }, bad, "final_state"}});
}

TEST_CASE("offsets: start, order, end, type, stride, and what goes with them") {
    const auto bad = CAKE_GDN_INVALID_ARGUMENT;
    int64_t start[] = {1, 30, 30, 130}, decreasing[] = {0, 30, 29, 130}, end[] = {0, 30, 30, 129},
            over[] = {0, 30, 30, 131}, negative[] = {0, -5, 30, 130},
            far[] = {0, std::numeric_limits<int64_t>::max(), 30, 130};
    int32_t narrow[] = {0, 30, 29, 130}, narrow_end[] = {0, 30, 30, 2};
    std::vector<Refusal> refusals;
    for (int64_t *offsets : {start, decreasing, end, over, negative, far}) {
        refusals.push_back({"int64", [=](cake_gdn_problem &p) { p.cu_seqlens.data = offsets; }, bad, "cu_seqlens["});
        refusals.push_back({"host copy",
                            [=](cake_gdn_problem &p) {
                                p.cu_seqlens_host = p.cu_seqlens;
                                p.cu_seqlens_host.data = offsets;
                            },
                            bad, "cu_seqlens_host["});
    }
    for (int32_t *offsets : {narrow, narrow_end}) {
        refusals.push_back({"int32",
                            [=](cake_gdn_problem &p) {
                                p.cu_seqlens.data = offsets;
                                p.cu_seqlens.dtype = CAKE_GDN_INT32;
                            },
                            bad, "cu_seqlens["});
    }
    for (int dtype : std::initializer_list<int>{CAKE_GDN_FP32, CAKE_GDN_FP64, CAKE_GDN_BF16, 6, -1}) {
        refusals.push_back(
            {"dtype", [=](cake_gdn_problem &p) { p.cu_seqlens.dtype = dtype; }, bad, "cu_seqlens has dtype"});
    }
    refusals.push_back(
        {"stride", [](cake_gdn_problem &p) { p.cu_seqlens.stride[0] = 2; }, bad, "cu_seqlens has stride"});
    refusals.push_back({"batch", [](cake_gdn_problem &p) { p.B = 2; }, bad, "B is 2"});
    refusals.push_back({"no batch", [](cake_gdn_problem &p) { p.B = 0; }, bad, "B is 0"});
    refusals.push_back({"fewer", [](cake_gdn_problem &p) { p.N = 2; }, bad, "cu_seqlens[2]"});
    refusals.push_back({"host alone",
                        [](cake_gdn_problem &p) {
                            p.cu_seqlens_host = p.cu_seqlens;
                            p.cu_seqlens.data = nullptr;
                            p.N = 1;
                        },
                        bad, "cu_seqlens_host"});
    check_refusals(packed_spec(), CAKE_GDN_FORWARD, refusals);
    check_refusals(packed_spec(), CAKE_GDN_BACKWARD, refusals);
}

TEST_CASE("outputs whose elements would share memory") {
    const auto bad = CAKE_GDN_INVALID_ARGUMENT;
    std::vector<Refusal> refusals;
    for (const Named &field : kOutputs) {
        const int dimensions = field.member == &cake_gdn_problem::dA_log || field.member == &cake_gdn_problem::ddt_bias
                                   ? 1
                               : field.member == &cake_gdn_problem::dg || field.member == &cake_gdn_problem::dbeta ? 3
                                                                                                                   : 4;
        for (int d = 0; d < dimensions; ++d) {
            const Member member = field.member;
            refusals.push_back({field.name, [=](cake_gdn_problem &p) { (p.*member).stride[d] = 0; }, bad, field.name});
        }
    }
    check_refusals(full_spec(), CAKE_GDN_BACKWARD, refusals);
    refusals.clear();
    for (int d = 0; d < 4; ++d) {
        refusals.push_back({"o", [=](cake_gdn_problem &p) { p.o.stride[d] = 0; }, bad, "o has stride 0"});
        refusals.push_back(
            {"final_state", [=](cake_gdn_problem &p) { p.final_state.stride[d] = 0; }, bad, "final_state"});
    }
    check_refusals(full_spec(), CAKE_GDN_FORWARD, refusals);
    // Inputs may repeat elements, and a dimension of size one may have any stride.
    Case call(full_spec());
    cake_gdn_problem p = call.problem(CAKE_GDN_BACKWARD);
    for (cake_gdn_tensor *t : {&p.q, &p.k, &p.v, &p.g, &p.beta, &p.d_o, &p.dht, &p.initial_state, &p.A_log}) {
        for (int64_t &stride : t->stride) stride = 0;
    }
    CHECK(run(p, CAKE_GDN_BACKWARD) == CAKE_GDN_OK);
    Spec one;
    one.T = 1, one.HV = 1, one.K = 1, one.V = 1;
    Case single(one);
    p = single.problem(CAKE_GDN_FORWARD);
    for (int64_t &stride : p.o.stride) stride = 0;
    CHECK(run(p, CAKE_GDN_FORWARD) == CAKE_GDN_OK);
}

TEST_CASE("the message is the thread's own") {
    REQUIRE(cake_gdn_forward(nullptr, nullptr, 0, nullptr) == CAKE_GDN_INVALID_ARGUMENT);
    const std::string mine = last_error();
    REQUIRE(!mine.empty());
    std::string before, after;
    std::thread([&] {
        before = last_error();
        Case call(full_spec());
        cake_gdn_problem p = call.problem(CAKE_GDN_FORWARD);
        p.num_threads = 0;
        size_t bytes = 0;
        (void)cake_gdn_workspace_size(&p, CAKE_GDN_FORWARD, &bytes);
        after = last_error();
    }).join();
    CHECK(before.empty());
    CHECK(after.find("num_threads") != std::string::npos);
    CHECK(last_error() == mine);
}

TEST_CASE("versions and types") {
    CHECK(cake_gdn_abi_version() == CAKE_GDN_ABI_VERSION);
    for (int dtype : {CAKE_GDN_BF16, CAKE_GDN_FP16, CAKE_GDN_FP32}) {
        CHECK(cake_gdn_state_dtype(CAKE_GDN_CPU, dtype) == CAKE_GDN_FP32);
    }
    CHECK(cake_gdn_state_dtype(CAKE_GDN_CPU, CAKE_GDN_FP64) == CAKE_GDN_FP64);
    const std::string info = cake_gdn_build_info();
    CHECK(info.front() == '{');
    CHECK(info.back() == '}');
    for (const char *key : {"version", "compiler", "abi_version", "archs", "programs", "cpu_units", "cpu_unit"}) {
        CHECK(info.find("\"" + std::string(key) + "\": ") != std::string::npos);
    }
    CHECK(cake_gdn_build_info() == cake_gdn_build_info());  // one text, owned by the library
}
