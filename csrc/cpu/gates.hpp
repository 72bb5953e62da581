// Gates and step sizes of one chunk and value head.
//
//   raw_i = g_i, or -exp(A_log) softplus(g_i + dt_bias);  beta_i = beta_i, or sigmoid(beta_i), or 2 sigmoid(beta_i)
//   cum_i = sum of raw over the tokens after the last reset, up to i
//   G_ij  = exp(cum_i - cum_j) for reset_i <= j <= i, else 0
//
// A token whose factor exp(raw_i) is zero in the engine's type is a reset: a cumulative sum cannot hold it (a later
// difference would be inf - inf, or lose every digit), so the sum restarts there and reset_i remembers the place.
// Everything a reset separates has an exact zero between it, so its gradient is exactly zero too. Sums are in double:
// 64 gates near -20 leave differences that single precision would round at 1e-4.
#pragma once

#include "cpu/io.hpp"
#include "cpu/simd.hpp"

namespace cake_gdn::cpu {
namespace {

constexpr int C = 64;

template <class T>
constexpr double kResetBelow = sizeof(T) == 4 ? -104.0 : -746.0;  // exp is zero, subnormals included

template <class T>
struct alignas(64) Gates {
    T from_start[C];  // exp(cum_i): what token i keeps of the chunk's starting state
    T to_end[C];      // G_(L-1)i: what the chunk's final state keeps of token i
    T beta[C];
    T row[C];  // one row of differences
    double cum[C];
    double raw[C];
    double draw_dg[C];       // of the in-kernel gate, else 1; 0 at a reset
    double dbeta_dinput[C];  // of the in-kernel sigmoid, else 1
    int32_t reset[C];        // last reset at or before the token, or -1
    T whole;                 // exp(cum_(L-1)) or 0: what the final state keeps of the starting state
};

inline double scalar_at(const cake_gdn_tensor &t, int64_t offset) {
    double value = 0;
    with_dtype(t.dtype, [&](auto *type) {
        using S = std::remove_pointer_t<decltype(type)>;
        value = convert_in<double>(static_cast<const S *>(t.data)[offset]);
    });
    return value;
}

inline double softplus(double x) {
    return x > 0 ? x + __builtin_log1p(__builtin_exp(-x)) : __builtin_log1p(__builtin_exp(x));
}
inline double sigmoid(double x) {
    const double e = __builtin_exp(x > 0 ? -x : x);
    return (x > 0 ? 1.0 : e) / (1.0 + e);
}

// Tokens [token, token + L) of the batch row b, value head hv. Entries from L on are zero.
template <class T>
inline void load_gates(Gates<T> &gates, const cake_gdn_problem &p, int64_t b, int64_t token, int64_t hv, int L) {
    const bool in_kernel = p.flags & CAKE_GDN_GATE, squash = p.flags & CAKE_GDN_BETA_SIGMOID;
    const double rate = in_kernel ? __builtin_exp(scalar_at(p.A_log, hv * p.A_log.stride[0])) : 0;
    const double bias = in_kernel && p.dt_bias.data ? scalar_at(p.dt_bias, hv * p.dt_bias.stride[0]) : 0;
    const double beta_top = p.flags & CAKE_GDN_NEG_EIGVAL ? 2.0 : 1.0;
    int32_t reset = -1;
    double cum = 0;
    for (int i = 0; i < L; ++i) {
        double raw = scalar_at(p.g, b * p.g.stride[0] + (token + i) * p.g.stride[1] + hv * p.g.stride[2]);
        double slope = 1;
        if (in_kernel) {
            // rate is 0 or infinite for A_log = -inf or +inf: no product 0 * inf is formed.
            const double plus = softplus(raw + bias), squashed = sigmoid(raw + bias);
            slope = rate == 0 || squashed == 0 ? 0 : -rate * squashed;
            raw = rate == 0 || plus == 0 ? 0 : -rate * plus;
        }
        if (raw <= kResetBelow<T>) {
            reset = i;
            cum = raw = slope = 0;
        }
        cum += raw;
        gates.raw[i] = raw;
        gates.draw_dg[i] = slope;
        gates.cum[i] = cum;
        gates.reset[i] = reset;

        double beta = scalar_at(p.beta, b * p.beta.stride[0] + (token + i) * p.beta.stride[1] + hv * p.beta.stride[2]);
        double beta_slope = 1;
        if (squash) {
            const double s = sigmoid(beta);
            beta = beta_top * s;
            beta_slope = beta_top * s * (1 - s);
        }
        gates.beta[i] = T(beta);
        gates.dbeta_dinput[i] = beta_slope;
    }
    const double end = gates.cum[L - 1];
    const int32_t end_reset = gates.reset[L - 1];
    for (int i = 0; i < C; ++i) gates.row[i] = i < L ? T(gates.cum[i]) : T(0);
    for (int i = 0; i < C; i += kLanes<T>) store(gates.from_start + i, exponential(load(gates.row + i)));
    for (int i = 0; i < C; ++i) gates.row[i] = i < L ? T(end - gates.cum[i]) : T(0);
    for (int i = 0; i < C; i += kLanes<T>) store(gates.to_end + i, exponential(load(gates.row + i)));
    for (int i = 0; i < C; ++i) {
        gates.from_start[i] = i < L && gates.reset[i] < 0 ? gates.from_start[i] : T(0);
        gates.to_end[i] = i < L && i >= end_reset ? gates.to_end[i] : T(0);
        gates.beta[i] = i < L ? gates.beta[i] : T(0);
    }
    gates.whole = gates.from_start[L - 1];
}

// decay[i, j] = G_ij, zero where the select says so; rows from L on are zero.
template <class T>
inline void fill_decay(T *decay, Gates<T> &gates, int L) {
    const IndexVec<T> lanes = lane_index<T>();
    for (int i = 0; i < C; ++i) {
        const int first = i < L ? gates.reset[i] : C, last = i;
        if (i < L) {
            for (int j = 0; j <= i; ++j) gates.row[j] = T(gates.cum[i] - gates.cum[j]);
        }
        for (int j = 0; j < C; j += kLanes<T>) {
            Vec<T> value = {};
            if (i < L && j <= last) {
                const IndexVec<T> column = lanes + j;
                value = (column >= first) & (column <= last) ? exponential(load(gates.row + j)) : value;
            }
            store(decay + i * C + j, value);
        }
    }
}

}  // namespace
}  // namespace cake_gdn::cpu
