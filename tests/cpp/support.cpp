#include "support.hpp"

#include <cmath>
#include <cstring>
#include <limits>

#include "plan/plan.hpp"

namespace cake_gdn::cpu {
extern const Unit unit_baseline;
#if defined(__x86_64__)
extern const Unit unit_avx2;
extern const Unit unit_avx512;
#endif
}  // namespace cake_gdn::cpu

namespace cake_gdn_test {

using namespace cake_gdn;

// ---- units ----------------------------------------------------------------------------------------------------------

namespace {
const cpu::Unit *chosen_unit = nullptr;
}

const cpu::Unit *find_unit(const std::string &name) {
    const cpu::Unit *const all[] = {
        &cpu::unit_baseline,
#if defined(__x86_64__)
        &cpu::unit_avx2,
        &cpu::unit_avx512,
#endif
    };
    for (const cpu::Unit *unit : all) {
        if (name == unit->name) return unit;
    }
    return nullptr;
}

const cpu::Unit &unit_under_test() { return chosen_unit ? *chosen_unit : cpu::selected_unit(); }
void set_unit(const cpu::Unit &unit) { chosen_unit = &unit; }

// ---- random numbers and 16-bit floats -------------------------------------------------------------------------------

uint64_t Random::bits() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}
int64_t Random::integer(int64_t low, int64_t high) { return low + int64_t(bits() % uint64_t(high - low + 1)); }
double Random::uniform(double low, double high) { return low + (high - low) * (double(bits() >> 11) * 0x1p-53); }

uint16_t encode16(double x, int exponent_bits, int mantissa_bits) {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    const int bias = (1 << (exponent_bits - 1)) - 1, lowest = 1 - bias;
    const uint32_t infinity = uint32_t((1 << exponent_bits) - 1) << mantissa_bits;
    const double magnitude = std::fabs(x);
    if (std::isnan(x)) return uint16_t(sign | infinity | (1u << (mantissa_bits - 1)));
    if (std::isinf(x)) return uint16_t(sign | infinity);
    if (magnitude == 0) return sign;
    const int exponent = std::max(std::ilogb(magnitude), lowest);
    if (exponent > bias) return uint16_t(sign | infinity);
    // Steps of the last place: the implicit one is among them, so a carry moves the exponent by itself.
    const double steps = std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent));
    const uint32_t code = (uint32_t(exponent - lowest) << mantissa_bits) + uint32_t(steps);
    return uint16_t(sign | std::min(code, infinity));
}

double decode16(uint16_t code, int exponent_bits, int mantissa_bits) {
    const int bias = (1 << (exponent_bits - 1)) - 1, top = (1 << exponent_bits) - 1;
    const int exponent = (code >> mantissa_bits) & top, mantissa = code & ((1 << mantissa_bits) - 1);
    const double sign = code & 0x8000 ? -1.0 : 1.0;
    if (exponent == top) {
        return mantissa ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
    }
    if (exponent == 0) return sign * std::ldexp(double(mantissa), 1 - bias - mantissa_bits);
    return sign * std::ldexp(double(mantissa + (1 << mantissa_bits)), exponent - bias - mantissa_bits);
}

int64_t element_bytes(int dtype) {
    switch (dtype) {
        case CAKE_GDN_BF16:
        case CAKE_GDN_FP16: return 2;
        case CAKE_GDN_FP32:
        case CAKE_GDN_INT32: return 4;
        default: return 8;
    }
}

// ---- tensors --------------------------------------------------------------------------------------------------------

Tensor::Tensor(int dtype, std::vector<int64_t> sizes, Layout layout) : dtype_(dtype), sizes_(std::move(sizes)) {
    constexpr int64_t kGuardBytes = 256;
    count_ = 1;
    for (int64_t size : sizes_) count_ *= size;
    strides_.assign(sizes_.size(), 0);
    int64_t stride = layout == Layout::spread ? 2 : 1, span = 1;
    for (size_t i = 0; i < sizes_.size(); ++i) {
        const size_t d = layout == Layout::permuted ? i : sizes_.size() - 1 - i;
        strides_[d] = stride;
        span += stride * std::max<int64_t>(sizes_[d] - 1, 0);
        stride = stride * std::max<int64_t>(sizes_[d], 1) + (layout == Layout::spread ? 3 : 0);
    }
    const int64_t bytes = element_bytes(dtype);
    // Aligned as an element, not as a vector.
    origin_ = kGuardBytes + bytes;
    if (layout == Layout::reversed) {
        origin_ += (span - 1) * bytes;
        for (int64_t &s : strides_) s = -s;
    }
    storage_.assign(size_t(2 * kGuardBytes + bytes + (count_ > 0 ? span : 0) * bytes), 0xff);
}

int64_t Tensor::byte_of(int64_t index) const {
    int64_t offset = 0;
    for (size_t d = sizes_.size(); d-- > 0;) {
        offset += index % sizes_[d] * strides_[d];
        index /= sizes_[d];
    }
    return origin_ + offset * element_bytes(dtype_);
}

namespace {
template <class X>
X read(const unsigned char *at) {
    X value;
    std::memcpy(&value, at, sizeof value);
    return value;
}
template <class X>
void write(unsigned char *at, X value) {
    std::memcpy(at, &value, sizeof value);
}
}  // namespace

double Tensor::get(int64_t index) const {
    const unsigned char *at = storage_.data() + byte_of(index);
    switch (dtype_) {
        case CAKE_GDN_BF16: return decode16(read<uint16_t>(at), 8, 7);
        case CAKE_GDN_FP16: return decode16(read<uint16_t>(at), 5, 10);
        case CAKE_GDN_FP32: return double(read<float>(at));
        case CAKE_GDN_INT32: return double(read<int32_t>(at));
        case CAKE_GDN_INT64: return double(read<int64_t>(at));
        default: return read<double>(at);
    }
}

void Tensor::set(int64_t index, double value) {
    unsigned char *at = storage_.data() + byte_of(index);
    switch (dtype_) {
        case CAKE_GDN_BF16: write(at, encode16(value, 8, 7)); break;
        case CAKE_GDN_FP16: write(at, encode16(value, 5, 10)); break;
        case CAKE_GDN_FP32: write(at, float(value)); break;
        case CAKE_GDN_INT32: write(at, int32_t(value)); break;
        case CAKE_GDN_INT64: write(at, int64_t(value)); break;
        default: write(at, value); break;
    }
}

std::vector<double> Tensor::values() const {
    std::vector<double> out(static_cast<size_t>(count_));
    for (int64_t i = 0; i < count_; ++i) out[size_t(i)] = get(i);
    return out;
}
void Tensor::set_values(const std::vector<double> &values) {
    for (int64_t i = 0; i < count_; ++i) set(i, values[size_t(i)]);
}
void Tensor::fill(Random &random, double low, double high) {
    for (int64_t i = 0; i < count_; ++i) set(i, random.uniform(low, high));
}

cake_gdn_tensor Tensor::view() {
    cake_gdn_tensor t{};
    if (storage_.empty()) return t;
    t.data = storage_.data() + origin_;
    t.dtype = dtype_;
    for (size_t d = 0; d < sizes_.size(); ++d) t.stride[d] = strides_[d];
    return t;
}

bool Tensor::guards_intact() const {
    std::vector<unsigned char> left = storage_;
    for (int64_t i = 0; i < count_; ++i) std::memset(left.data() + byte_of(i), 0xff, size_t(element_bytes(dtype_)));
    for (unsigned char byte : left) {
        if (byte != 0xff) return false;
    }
    return true;
}

// ---- problems -------------------------------------------------------------------------------------------------------

Case::Case(const Spec &s) : spec(s), N(s.offsets.empty() ? s.B : int64_t(s.offsets.size()) - 1) {
    const bool gate = s.flags & CAKE_GDN_GATE, v_first = s.flags & CAKE_GDN_STATE_V_FIRST;
    const int wide = s.dtype == CAKE_GDN_FP64 ? CAKE_GDN_FP64 : CAKE_GDN_FP32;
    const std::vector<int64_t> keys{s.B, s.T, s.H, s.K}, values{s.B, s.T, s.HV, s.V}, gates{s.B, s.T, s.HV};
    const std::vector<int64_t> states =
        v_first ? std::vector<int64_t>{N, s.HV, s.V, s.K} : std::vector<int64_t>{N, s.HV, s.K, s.V};
    Random random(s.seed);
    for (Tensor *t : {&q, &k}) {
        *t = Tensor(s.dtype, keys, s.layout);
        // Keys of about unit length keep the recurrence from growing.
        const double edge = s.unit_keys ? std::sqrt(3.0 / double(s.K)) * 0.9 : 1.0;
        t->fill(random, -edge, edge);
    }
    v = Tensor(s.dtype, values, s.layout);
    v.fill(random, -1, 1);
    g = Tensor(s.gate_dtype, gates, s.layout);
    g.fill(random, s.gate_low, s.gate_high);
    for (int64_t i = 0; i < g.count(); ++i) {
        if (random.uniform(0, 1) < s.reset_share) g.set(i, -std::numeric_limits<double>::infinity());
    }
    beta = Tensor(s.gate_dtype, gates, s.layout);
    beta.fill(random, s.beta_low, s.beta_high);
    if (gate) {
        A_log = Tensor(s.gate_dtype, {s.HV}, s.layout);
        A_log.fill(random, -1, 0.5);
        if (s.dt_bias) dt_bias = Tensor(s.gate_dtype, {s.HV}, s.layout);
        dt_bias.fill(random, -1, 1);
        dA_log = Tensor(wide, {s.HV}, s.layout);
        ddt_bias = Tensor(wide, {s.HV}, s.layout);
    }
    if (s.initial_state) {
        initial_state = Tensor(s.gate_dtype, states, s.layout);
        initial_state.fill(random, -0.5, 0.5);
    }
    if (!s.offsets.empty()) {
        cu_seqlens = Tensor(s.offset_dtype, {N + 1});
        for (int64_t i = 0; i <= N; ++i) cu_seqlens.set(i, double(s.offsets[size_t(i)]));
    }
    d_o = Tensor(s.dtype, values, s.layout);
    d_o.fill(random, -1, 1);
    dht = Tensor(wide, states, s.layout);
    dht.fill(random, -0.5, 0.5);

    o = Tensor(s.dtype, values, s.layout);
    final_state = Tensor(wide, states, s.layout);
    const int64_t slots = cake_gdn_state_slots(s.B, s.T);
    if (s.save_state) h = Tensor(wide, {slots, s.HV, s.K, s.V});
    dq = Tensor(s.dtype, keys, s.layout);
    dk = Tensor(s.dtype, keys, s.layout);
    dv = Tensor(s.dtype, values, s.layout);
    dg = Tensor(s.gate_dtype, gates, s.layout);
    dbeta = Tensor(s.gate_dtype, gates, s.layout);
    dh0 = Tensor(wide, states, s.layout);
}

cake_gdn_problem Case::problem(cake_gdn_direction direction) {
    cake_gdn_problem p{};
    p.struct_size = sizeof p;
    p.backend = CAKE_GDN_CPU;
    p.num_threads = spec.threads;
    p.flags = spec.flags;
    p.scale = 1 / std::sqrt(double(spec.K));
    p.B = spec.B, p.T = spec.T, p.H = spec.H, p.HV = spec.HV, p.K = spec.K, p.V = spec.V, p.N = N;
    p.q = q.view(), p.k = k.view(), p.v = v.view(), p.g = g.view(), p.beta = beta.view();
    p.A_log = A_log.view(), p.dt_bias = dt_bias.view();
    p.initial_state = initial_state.view(), p.cu_seqlens = cu_seqlens.view();
    p.h = h.view();
    p.slots = spec.save_state ? cake_gdn_state_slots(spec.B, spec.T) : 0;
    if (direction == CAKE_GDN_FORWARD) {
        p.o = o.view(), p.final_state = final_state.view();
    } else {
        p.d_o = d_o.view(), p.dht = dht.view();
        p.dq = dq.view(), p.dk = dk.view(), p.dv = dv.view(), p.dg = dg.view(), p.dbeta = dbeta.view();
        p.dA_log = dA_log.view(), p.ddt_bias = ddt_bias.view(), p.dh0 = dh0.view();
    }
    return p;
}

std::vector<Tensor *> Case::outputs() {
    return {&o, &final_state, &h, &dq, &dk, &dv, &dg, &dbeta, &dA_log, &ddt_bias, &dh0};
}
std::vector<const Tensor *> Case::outputs() const {
    return {&o, &final_state, &h, &dq, &dk, &dv, &dg, &dbeta, &dA_log, &ddt_bias, &dh0};
}

void Case::forget_outputs() {
    for (Tensor *t : outputs()) {
        for (int64_t i = 0; i < t->count(); ++i) t->set(i, std::numeric_limits<double>::quiet_NaN());
    }
}

std::vector<double> Case::state_values(const Tensor &state) const {
    std::vector<double> out = state.values();
    if (!(spec.flags & CAKE_GDN_STATE_V_FIRST)) return out;
    const std::vector<double> from = out;
    for (int64_t m = 0; m < state.count() / (spec.K * spec.V); ++m) {
        for (int64_t i = 0; i < spec.K; ++i) {
            for (int64_t j = 0; j < spec.V; ++j) {
                out[size_t((m * spec.K + i) * spec.V + j)] = from[size_t((m * spec.V + j) * spec.K + i)];
            }
        }
    }
    return out;
}

Inputs Case::inputs() const {
    Inputs in{spec.B,
              spec.T,
              spec.H,
              spec.HV,
              spec.K,
              spec.V,
              N,
              spec.offsets,
              spec.flags,
              1 / std::sqrt(double(spec.K)),
              q.values(),
              k.values(),
              v.values(),
              g.values(),
              beta.values(),
              A_log.values(),
              dt_bias.values(),
              state_values(initial_state),
              d_o.values(),
              state_values(dht)};
    return in;
}

Results Case::results() const {
    return {o.values(),     state_values(final_state), dq.values(),       dk.values(),      dv.values(), dg.values(),
            dbeta.values(), dA_log.values(),           ddt_bias.values(), state_values(dh0)};
}

std::vector<std::vector<unsigned char>> Case::output_bytes() const {
    std::vector<std::vector<unsigned char>> out;
    for (const Tensor *t : outputs()) out.push_back(t->storage());
    return out;
}

std::vector<std::vector<unsigned char>> Case::input_bytes() const {
    std::vector<std::vector<unsigned char>> out;
    for (const Tensor *t : {&q, &k, &v, &g, &beta, &A_log, &dt_bias, &initial_state, &cu_seqlens, &d_o, &dht}) {
        out.push_back(t->storage());
    }
    return out;
}

bool Case::guards_intact() const {
    for (const Tensor *t : outputs()) {
        if (!t->guards_intact()) return false;
    }
    return true;
}

// ---- one unit -------------------------------------------------------------------------------------------------------

void run_unit(const cpu::Unit &unit, const cake_gdn_problem &p, cake_gdn_direction direction, int threads,
              unsigned char fill) {
    plan::Shape shape{};
    shape.B = p.B, shape.T = p.T, shape.H = p.H, shape.HV = p.HV, shape.K = p.K, shape.V = p.V, shape.N = p.N;
    shape.state_bytes = p.q.dtype == CAKE_GDN_FP64 ? 8 : 4;
    shape.backward = direction == CAKE_GDN_BACKWARD;
    shape.saved_states = p.h.data != nullptr;
    shape.gate_gradients = shape.backward && (p.dA_log.data || p.ddt_bias.data);
    const plan::CpuPlan plan = plan::plan_cpu(shape, plan::Traits{threads});

    std::vector<char> memory(static_cast<size_t>(plan.bytes), char(fill));
    cpu::run(unit, p, plan, direction, memory.data());
}

void run_unit(const cpu::Unit &unit, Case &call, int threads, unsigned char fill) {
    call.forget_outputs();
    run_unit(unit, call.problem(CAKE_GDN_FORWARD), CAKE_GDN_FORWARD, threads, fill);
    run_unit(unit, call.problem(CAKE_GDN_BACKWARD), CAKE_GDN_BACKWARD, threads, fill);
}

double error(const std::vector<double> &got, const std::vector<double> &wanted) {
    if (got.size() != wanted.size()) return -1;
    double worst = 0, largest = 1e-30;
    for (size_t i = 0; i < got.size(); ++i) {
        const double difference = std::fabs(got[i] - wanted[i]);
        if (std::isnan(difference)) return difference;
        worst = std::max(worst, difference);
        largest = std::max(largest, std::fabs(wanted[i]));
    }
    return worst / largest;
}

}  // namespace cake_gdn_test
