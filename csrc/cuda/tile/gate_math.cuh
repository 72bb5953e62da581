// What the operator makes of a gate and of a step size, and the slopes that their gradients need.
//
//     raw  = g, or -exp(A_log) softplus(g + dt_bias) with CAKE_GDN_GATE
//     step = beta, or sigmoid(beta), or 2 sigmoid(beta) with CAKE_GDN_BETA_SIGMOID (and CAKE_GDN_NEG_EIGVAL)
//
// A token whose factor exp(raw) is zero in fp32 is a reset: the cumulative sum restarts there. The rules for infinities
// are the CPU engine's (cpu/gates.hpp): A_log = -inf or g = -inf is no decay, any other infinite product a reset, and
// no product 0 * inf is formed.
#pragma once

#include <cfloat>

#include "cuda/tile/scalars.cuh"

namespace cake_gdn::cuda {

constexpr float kResetBelow = -104.0f;  // exp is zero, subnormals included

__device__ __forceinline__ bool is_reset(float raw) { return raw <= kResetBelow; }

// The parameters of a head's in-kernel gate.
struct GateHead {
    float A_log, rate, bias;  // rate = exp(A_log)
};

template <class Params>
__device__ __forceinline__ GateHead gate_head(const Params &p, int64_t hv) {
    GateHead head = {0.0f, 0.0f, 0.0f};
    if (p.flags & CAKE_GDN_GATE) {
        head.A_log = scalar_at(p.A_log, p.A_log_dtype, hv * p.A_log_stride);
        head.rate = expf(head.A_log);
        if (p.dt_bias != nullptr) head.bias = scalar_at(p.dt_bias, p.dt_bias_dtype, hv * p.dt_bias_stride);
    }
    return head;
}

// A value and its derivative by the input.
struct Valued {
    float value, slope;
};

__device__ __forceinline__ Valued in_kernel_gate(float g, const GateHead &head) {
    const float x = g + head.bias;
    const float e = expf(-fabsf(x));
    const float softplus = fmaxf(x, 0.0f) + log1pf(e), sigmoid = __fdividef(x > 0.0f ? 1.0f : e, 1.0f + e);
    if (head.rate >= FLT_MIN && head.rate <= FLT_MAX && softplus >= FLT_MIN) {
        return {-head.rate * softplus, -head.rate * sigmoid};
    }
    if (head.A_log == -INFINITY || x == -INFINITY) return {0.0f, 0.0f};
    // exp(A_log) or the softplus leaves the normal numbers, but their product need not: through their logarithms.
    // Both softplus and sigmoid are exp(x) to the last bit where x < -17.
    const float log_softplus = x < -17.0f ? x : logf(softplus), log_sigmoid = x < -17.0f ? x : logf(sigmoid);
    return {-expf(head.A_log + log_softplus), -expf(head.A_log + log_sigmoid)};
}

// The log decay of a token; a reset where is_reset(value).
template <class Params>
__device__ __forceinline__ Valued gate_of(const Params &p, float g, const GateHead &head) {
    return p.flags & CAKE_GDN_GATE ? in_kernel_gate(g, head) : Valued{g, 1.0f};
}

template <class Params>
__device__ __forceinline__ Valued step_of(const Params &p, float beta) {
    if (!(p.flags & CAKE_GDN_BETA_SIGMOID)) return {beta, 1.0f};
    const float top = p.flags & CAKE_GDN_NEG_EIGVAL ? 2.0f : 1.0f;
    const float e = expf(-fabsf(beta)), sum = 1.0f + e;
    // s (1 - s) = e / (1 + e)^2, which does not cancel for s near 1.
    return {top * __fdividef(beta > 0.0f ? 1.0f : e, sum), top * __fdividef(e, sum * sum)};
}

// What the gate's inputs must be, for the host functions of the programs that read them; null when they are right.
template <class Params>
const char *gate_inputs_fault(const Params &p) {
    if (p.head_begin != 0 || p.heads != p.HV) return "head_begin and heads must be 0 and HV: all heads at once";
    if (!is_floating(p.g_dtype) || !is_floating(p.beta_dtype)) return "g_dtype and beta_dtype must be floating";
    if ((p.flags & CAKE_GDN_NEG_EIGVAL) && !(p.flags & CAKE_GDN_BETA_SIGMOID)) return "NEG_EIGVAL needs BETA_SIGMOID";
    if (p.flags & CAKE_GDN_GATE) {
        if (p.A_log == nullptr) return "A_log must not be null with GATE";
        if (!is_floating(p.A_log_dtype)) return "A_log_dtype must be floating";
        if (p.dt_bias != nullptr && !is_floating(p.dt_bias_dtype)) return "dt_bias_dtype must be floating";
    }
    return nullptr;
}

}  // namespace cake_gdn::cuda
