#include "api/checks.hpp"

#include <cfloat>
#include <cmath>
#include <cstddef>

namespace cake_gdn::api {
namespace {

constexpr int64_t kLargestHead = 512;
constexpr double kFarthestElement = 1.0e18;  // elements from the first; 8 bytes each fit in 63 bits
constexpr double kLargestTensor = 4.0e18;    // elements; keeps every 64-bit offset from overflowing

std::string text(int64_t value) { return std::to_string(value); }

[[noreturn]] void invalid(const std::string &message) { throw Failure(CAKE_GDN_INVALID_ARGUMENT, message); }

const char *dtype_name(int dtype) {
    static const char *const names[] = {"bf16", "fp16", "fp32", "fp64", "int32", "int64"};
    return dtype >= 0 && dtype < 6 ? names[dtype] : "unknown";
}

bool is_floating(int dtype) { return dtype >= CAKE_GDN_BF16 && dtype <= CAKE_GDN_FP64; }

void require_at_least(const char *name, int64_t value, int64_t least) {
    if (value < least) invalid(std::string(name) + " is " + text(value) + "; it must be at least " + text(least));
}

// One tensor field: how many elements it has, and what is expected of it.
class Field {
public:
    Field(const char *name, const cake_gdn_tensor &tensor, int64_t elements)
        : name_(name), tensor_(tensor), elements_(elements) {}

    const Field &required() const {
        if (tensor_.data == nullptr && elements_ > 0) {
            invalid(std::string(name_) + " is NULL; it must point to " + text(elements_) + " elements");
        }
        return *this;
    }
    const Field &floating() const {
        if (present() && !is_floating(tensor_.dtype)) {
            invalid(std::string(name_) + " has dtype " + dtype_name(tensor_.dtype) +
                    "; it must be bf16, fp16, fp32 or fp64");
        }
        return *this;
    }
    const Field &dtype(int expected, const char *why) const {
        if (present() && tensor_.dtype != expected) {
            invalid(std::string(name_) + " has dtype " + dtype_name(tensor_.dtype) + "; it must be " +
                    dtype_name(expected) + ", " + why);
        }
        return *this;
    }
    const Field &only_with(bool condition, const char *what) const {
        if (present() && !condition) invalid(std::string(name_) + " is given; it is allowed only with " + what);
        return *this;
    }
    // An output: a zero stride would make two results share an element.
    const Field &distinct(std::initializer_list<int64_t> sizes) const {
        if (!present() || elements_ == 0) return *this;
        addressable(sizes);
        int dimension = 0;
        for (int64_t size : sizes) {
            if (size > 1 && tensor_.stride[dimension] == 0) {
                invalid(std::string(name_) + " has stride 0 in dimension " + text(dimension) + " of size " +
                        text(size) + "; an output's elements must be distinct");
            }
            ++dimension;
        }
        return *this;
    }

    const Field &contiguous(std::initializer_list<int64_t> sizes) const {
        if (!present() || elements_ == 0) return *this;
        int64_t expected = elements_;
        int dimension = 0;
        for (int64_t size : sizes) {
            expected /= size;
            if (size > 1 && tensor_.stride[dimension] != expected) {
                invalid(std::string(name_) + " has stride " + text(tensor_.stride[dimension]) + " in dimension " +
                        text(dimension) + "; it must be contiguous, with stride " + text(expected));
            }
            ++dimension;
        }
        return *this;
    }

    // Every element's offset must fit in 64 bits.
    const Field &addressable(std::initializer_list<int64_t> sizes) const {
        if (!present() || elements_ == 0) return *this;
        double reach = 0;
        int dimension = 0;
        for (int64_t size : sizes) reach += std::fabs(double(tensor_.stride[dimension++])) * double(size - 1);
        if (reach > kFarthestElement) invalid(std::string(name_) + " has strides that reach beyond 64-bit offsets");
        return *this;
    }

private:
    bool present() const { return tensor_.data != nullptr; }
    const char *name_;
    const cake_gdn_tensor &tensor_;
    int64_t elements_;
};

void check_sizes(const cake_gdn_problem &p) {
    require_at_least("B", p.B, 0);
    require_at_least("T", p.T, 0);
    require_at_least("N", p.N, 0);
    require_at_least("H", p.H, 1);
    require_at_least("HV", p.HV, 1);
    require_at_least("K", p.K, 1);
    require_at_least("V", p.V, 1);
    if (p.HV % p.H != 0) invalid("HV is " + text(p.HV) + "; it must be a multiple of H = " + text(p.H));
    if (p.K > kLargestHead || p.V > kLargestHead) {
        throw Failure(CAKE_GDN_UNSUPPORTED, "K is " + text(p.K) + " and V is " + text(p.V) +
                                                "; the largest supported head size is " + text(kLargestHead));
    }
    const double widest = double(p.K > p.V ? p.K : p.V);
    if (double(p.B) * double(p.T) * double(p.HV) * widest > kLargestTensor ||
        double(p.N) * double(p.HV) * double(p.K) * double(p.V) > kLargestTensor) {
        invalid("B, T, N, HV, K, V describe a tensor of more than 4e18 elements");
    }
    if (p.cu_seqlens.data == nullptr && p.N != p.B) {
        invalid("N is " + text(p.N) + "; without cu_seqlens it must equal B = " + text(p.B));
    }
    if (p.cu_seqlens.data != nullptr && p.B != 1) {
        invalid("B is " + text(p.B) + "; with cu_seqlens it must be 1");
    }
}

template <class I>
void check_offsets(const char *name, const I *offsets, int64_t N, int64_t T) {
    if (offsets[0] != 0) invalid(std::string(name) + "[0] is " + text(offsets[0]) + "; the first offset must be 0");
    for (int64_t n = 0; n < N; ++n) {
        if (offsets[n + 1] < offsets[n]) {
            invalid(std::string(name) + "[" + text(n + 1) + "] is " + text(offsets[n + 1]) + ", below " + name + "[" +
                    text(n) + "] = " + text(offsets[n]) + "; offsets must not decrease");
        }
    }
    if (offsets[N] != T) {
        invalid(std::string(name) + "[" + text(N) + "] is " + text(offsets[N]) +
                "; the last offset must be T = " + text(T));
    }
}

void check_host_offsets(const char *name, const cake_gdn_tensor &t, int64_t N, int64_t T) {
    if (t.dtype == CAKE_GDN_INT32) {
        check_offsets(name, static_cast<const int32_t *>(t.data), N, T);
    } else {
        check_offsets(name, static_cast<const int64_t *>(t.data), N, T);
    }
}

void check_sequences(const cake_gdn_problem &p) {
    const struct {
        const char *name;
        const cake_gdn_tensor &tensor;
        bool on_host;
    } fields[] = {{"cu_seqlens", p.cu_seqlens, p.backend == CAKE_GDN_CPU},
                  {"cu_seqlens_host", p.cu_seqlens_host, true}};
    for (const auto &f : fields) {
        if (f.tensor.data == nullptr) continue;
        if (f.tensor.dtype != CAKE_GDN_INT32 && f.tensor.dtype != CAKE_GDN_INT64) {
            invalid(std::string(f.name) + " has dtype " + dtype_name(f.tensor.dtype) + "; it must be int32 or int64");
        }
        if (p.N > 0 && f.tensor.stride[0] != 1) {
            invalid(std::string(f.name) + " has stride " + text(f.tensor.stride[0]) + "; it must be contiguous");
        }
        if (f.on_host) check_host_offsets(f.name, f.tensor, p.N, p.T);
    }
    if (p.cu_seqlens_host.data != nullptr && p.cu_seqlens.data == nullptr) {
        invalid("cu_seqlens_host is given without cu_seqlens");
    }
}

}  // namespace

int64_t dtype_bytes(int dtype) {
    return dtype == CAKE_GDN_FP64 || dtype == CAKE_GDN_INT64   ? 8
           : dtype == CAKE_GDN_FP32 || dtype == CAKE_GDN_INT32 ? 4
                                                               : 2;
}

void check_problem(const cake_gdn_problem &p, cake_gdn_direction direction) {
    if (p.backend != CAKE_GDN_CPU && p.backend != CAKE_GDN_CUDA) {
        invalid("backend is " + text(p.backend) + "; it must be CAKE_GDN_CPU (0) or CAKE_GDN_CUDA (1)");
    }
    if (direction != CAKE_GDN_FORWARD && direction != CAKE_GDN_BACKWARD) {
        invalid("direction is " + text(direction) + "; it must be CAKE_GDN_FORWARD (0) or CAKE_GDN_BACKWARD (1)");
    }
    if (p.backend == CAKE_GDN_CPU) {
        require_at_least("num_threads", p.num_threads, 1);
        if (p.plan != nullptr) {
            invalid("plan is \"" + std::string(p.plan).substr(0, 60) +
                    "\"; it must be NULL: the CPU has no choices to pin");
        }
    }
    const uint32_t known = CAKE_GDN_QK_L2NORM | CAKE_GDN_GATE | CAKE_GDN_BETA_SIGMOID | CAKE_GDN_NEG_EIGVAL |
                           CAKE_GDN_STATE_V_FIRST | CAKE_GDN_BATCH_INVARIANT;
    if (p.flags & ~known) invalid("flags has unknown bits " + text(p.flags & ~known));
    if ((p.flags & CAKE_GDN_NEG_EIGVAL) && !(p.flags & CAKE_GDN_BETA_SIGMOID)) {
        invalid("flags has CAKE_GDN_NEG_EIGVAL; it is allowed only with CAKE_GDN_BETA_SIGMOID");
    }
    const double largest = p.q.dtype == CAKE_GDN_FP64 ? DBL_MAX : double(FLT_MAX);
    if (!(std::fabs(p.scale) <= largest)) {
        invalid("scale is " + std::to_string(p.scale) + "; it must be finite, in fp32 unless the inputs are fp64");
    }
    check_sizes(p);
    check_sequences(p);

    const bool gate = p.flags & CAKE_GDN_GATE;
    const int64_t tokens = p.B * p.T, keys = tokens * p.H * p.K, values = tokens * p.HV * p.V, gates = tokens * p.HV;
    const int64_t states = p.N * p.HV * p.K * p.V;
    const bool v_first = p.flags & CAKE_GDN_STATE_V_FIRST;
    const int64_t state_rows = v_first ? p.V : p.K, state_columns = v_first ? p.K : p.V;
    Field("q", p.q, keys).required().floating().addressable({p.B, p.T, p.H, p.K});
    Field("k", p.k, keys).required().dtype(p.q.dtype, "like q").addressable({p.B, p.T, p.H, p.K});
    Field("v", p.v, values).required().dtype(p.q.dtype, "like q").addressable({p.B, p.T, p.HV, p.V});
    Field("g", p.g, gates).required().floating().addressable({p.B, p.T, p.HV});
    Field("beta", p.beta, gates).required().floating().addressable({p.B, p.T, p.HV});
    if (gate) Field("A_log", p.A_log, p.HV).required();
    Field("A_log", p.A_log, p.HV).floating().only_with(gate, "CAKE_GDN_GATE").addressable({p.HV});
    Field("dt_bias", p.dt_bias, p.HV).floating().only_with(gate, "CAKE_GDN_GATE").addressable({p.HV});
    Field("initial_state", p.initial_state, states).floating().addressable({p.N, p.HV, state_rows, state_columns});

    const int state_dtype = cake_gdn_state_dtype(p.backend, p.q.dtype);
    const int result_dtype = p.q.dtype == CAKE_GDN_FP64 ? CAKE_GDN_FP64 : CAKE_GDN_FP32;
    const char *result_why = "fp64 for fp64 inputs and fp32 otherwise";
    const int64_t slots = p.h.data != nullptr ? plan::state_slots(p.B, p.T) : 0;
    const int64_t width = cake_gdn_state_width(p.backend, p.V);
    const Field h("h", p.h, slots * p.HV * p.K * width);
    h.dtype(state_dtype, "as cake_gdn_state_dtype says");
    if (p.slots != slots) {
        invalid("slots is " + text(p.slots) + "; with h " + (p.h.data ? "given" : "absent") + " it must be " +
                text(slots));
    }
    h.contiguous({slots, p.HV, p.K, width});
    if (p.backend == CAKE_GDN_CUDA && p.h.data != nullptr && p.A.data == nullptr) {
        invalid("A is NULL; on a GPU it must be given with h");
    }
    Field("A", p.A, tokens * p.HV * plan::kChunk).dtype(p.q.dtype, "like q").contiguous({p.B, p.T, p.HV, plan::kChunk});
    if (direction == CAKE_GDN_FORWARD) {
        Field("o", p.o, values).required().dtype(p.q.dtype, "like q").distinct({p.B, p.T, p.HV, p.V});
        Field("final_state", p.final_state, states)
            .dtype(result_dtype, result_why)
            .distinct({p.N, p.HV, state_rows, state_columns});
        return;
    }
    const Field d_o("d_o", p.d_o, values);
    d_o.floating().addressable({p.B, p.T, p.HV, p.V});
    if (p.backend == CAKE_GDN_CUDA) d_o.dtype(p.q.dtype, "like q on a GPU");
    Field("dht", p.dht, states).floating().addressable({p.N, p.HV, state_rows, state_columns});
    Field("dq", p.dq, keys).dtype(p.q.dtype, "like q").distinct({p.B, p.T, p.H, p.K});
    Field("dk", p.dk, keys).dtype(p.q.dtype, "like q").distinct({p.B, p.T, p.H, p.K});
    Field("dv", p.dv, values).dtype(p.q.dtype, "like q").distinct({p.B, p.T, p.HV, p.V});
    Field("dg", p.dg, gates).floating().distinct({p.B, p.T, p.HV});
    Field("dbeta", p.dbeta, gates).floating().distinct({p.B, p.T, p.HV});
    Field("dA_log", p.dA_log, p.HV).floating().only_with(gate, "CAKE_GDN_GATE").distinct({p.HV});
    Field("ddt_bias", p.ddt_bias, p.HV).floating().only_with(gate, "CAKE_GDN_GATE").distinct({p.HV});
    Field("dh0", p.dh0, states).dtype(result_dtype, result_why).distinct({p.N, p.HV, state_rows, state_columns});
}

}  // namespace cake_gdn::api
