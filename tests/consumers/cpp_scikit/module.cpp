// A Python module of another project on top of cake_gdn_det.hpp: forward and backward of one float sequence, checked
// against the token recurrence and a central difference of it.
#include <pybind11/pybind11.h>

#include <cake_gdn_det/cake_gdn_det.hpp>
#include <cmath>
#include <random>
#include <vector>

namespace {

constexpr int64_t T = 130, H = 2, HV = 4, K = 8, V = 6;

struct Inputs {
    std::vector<double> q = std::vector<double>(T * H * K), k = q, v = std::vector<double>(T * HV * V),
                        g = std::vector<double>(T * HV), beta = g;
    template <class F>
    void each(F f) {
        for (auto *x : {&q, &k, &v, &g, &beta}) f(*x);
    }
};

constexpr double kScale = 0.3;

std::vector<double> recurrence(const Inputs &in) {
    std::vector<double> o(T * HV * V);
    for (int64_t hv = 0; hv < HV; ++hv) {
        std::vector<double> S(K * V, 0.0);
        for (int64_t t = 0; t < T; ++t) {
            const double *q = &in.q[(t * H + hv / (HV / H)) * K], *k = &in.k[(t * H + hv / (HV / H)) * K];
            for (double &s : S) s *= std::exp(in.g[t * HV + hv]);
            for (int64_t j = 0; j < V; ++j) {
                double r = in.v[(t * HV + hv) * V + j], sum = 0;
                for (int64_t i = 0; i < K; ++i) r -= S[i * V + j] * k[i];
                for (int64_t i = 0; i < K; ++i) S[i * V + j] += k[i] * in.beta[t * HV + hv] * r;
                for (int64_t i = 0; i < K; ++i) sum += S[i * V + j] * q[i];
                o[(t * HV + hv) * V + j] = kScale * sum;
            }
        }
    }
    return o;
}

double dot(const std::vector<double> &a, const std::vector<double> &b) {
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
    return sum;
}

// {largest error of o, slope by the backward, slope by differences}
pybind11::tuple check() {
    std::mt19937_64 random(3);
    std::uniform_real_distribution<double> uniform(-0.5, 0.5);
    Inputs in, grad, direction;
    const auto draw = [&](std::vector<double> &x) {
        for (double &value : x) value = uniform(random);
    };
    in.each(draw);
    direction.each(draw);
    for (double &g : in.g) g = 0.2 * (g - 0.5);
    std::vector<double> weight(T * HV * V), o(T * HV * V);
    draw(weight);

    cake_gdn::check_abi();
    cake_gdn_problem p = cake_gdn::problem();
    p.scale = kScale;
    p.B = 1, p.T = T, p.H = H, p.HV = HV, p.K = K, p.V = V, p.N = 1;
    p.q = cake_gdn::contiguous(in.q.data(), {1, T, H, K});
    p.k = cake_gdn::contiguous(in.k.data(), {1, T, H, K});
    p.v = cake_gdn::contiguous(in.v.data(), {1, T, HV, V});
    p.g = cake_gdn::contiguous(in.g.data(), {1, T, HV});
    p.beta = cake_gdn::contiguous(in.beta.data(), {1, T, HV});
    p.o = cake_gdn::contiguous(o.data(), {1, T, HV, V});
    cake_gdn::Workspace scratch;
    cake_gdn::forward(p, scratch);

    p.d_o = cake_gdn::contiguous(weight.data(), {1, T, HV, V});
    p.dq = cake_gdn::contiguous(grad.q.data(), {1, T, H, K});
    p.dk = cake_gdn::contiguous(grad.k.data(), {1, T, H, K});
    p.dv = cake_gdn::contiguous(grad.v.data(), {1, T, HV, V});
    p.dg = cake_gdn::contiguous(grad.g.data(), {1, T, HV});
    p.dbeta = cake_gdn::contiguous(grad.beta.data(), {1, T, HV});
    cake_gdn::backward(p, scratch);

    const std::vector<double> want = recurrence(in);
    double error = 0;
    for (std::size_t i = 0; i < o.size(); ++i) error = std::max(error, std::abs(o[i] - want[i]));
    const double slope = dot(grad.q, direction.q) + dot(grad.k, direction.k) + dot(grad.v, direction.v) +
                         dot(grad.g, direction.g) + dot(grad.beta, direction.beta);
    constexpr double kStep = 1e-6;
    double values[2];
    for (int side = 0; side < 2; ++side) {
        Inputs x = in;
        const double step = side ? -kStep : kStep;
        const auto shift = [&](std::vector<double> &to, const std::vector<double> &by) {
            for (std::size_t i = 0; i < to.size(); ++i) to[i] += step * by[i];
        };
        shift(x.q, direction.q), shift(x.k, direction.k), shift(x.v, direction.v);
        shift(x.g, direction.g), shift(x.beta, direction.beta);
        values[side] = dot(recurrence(x), weight);
    }
    return pybind11::make_tuple(error, slope, (values[0] - values[1]) / (2 * kStep));
}

// The status of a call with a bad struct_size, through the exception.
int bad_call() {
    cake_gdn_problem p = cake_gdn::problem();
    p.struct_size = 3;
    try {
        cake_gdn::workspace_size(p, CAKE_GDN_FORWARD);
    } catch (const cake_gdn::error &error) {
        return std::string(error.what()).empty() ? -1 : error.status();
    }
    return 0;
}

}  // namespace

PYBIND11_MODULE(gdn_consumer, m) {
    m.def("check", &check);
    m.def("bad_call", &bad_call);
}
