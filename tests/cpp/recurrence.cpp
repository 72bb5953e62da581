#include "recurrence.hpp"

#include <cmath>

#include "cake_gdn_det/cake_gdn_det.h"

namespace cake_gdn_test {
namespace {

double log1p_exp(double x) { return x > 30 ? x : std::log1p(std::exp(x)); }
double logistic(double x) { return 1 / (1 + std::exp(-x)); }

// One sequence and value head: tokens [begin, end) of the batch row b.
class Walk {
public:
    Walk(const Inputs &in, Results &out, int64_t n, int64_t hv)
        : in_(in), out_(out), n_(n), hv_(hv), h_(hv / (in.HV / in.H)), K_(in.K), V_(in.V) {
        const bool packed = !in.offsets.empty();
        b_ = packed ? 0 : n;
        begin_ = packed ? in.offsets[size_t(n)] : 0;
        end_ = packed ? in.offsets[size_t(n) + 1] : in.T;
    }

    void run() {
        const size_t size = size_t(K_ * V_), first = size_t((n_ * in_.HV + hv_) * K_ * V_);
        std::vector<double> S(size, 0.0);
        for (size_t i = 0; i < size && !in_.initial_state.empty(); ++i) S[i] = in_.initial_state[first + i];
        std::vector<std::vector<double>> before;
        for (int64_t t = begin_; t < end_; ++t) {
            before.push_back(S);
            step(t, S);
        }
        for (size_t i = 0; i < size; ++i) out_.final_state[first + i] = S[i];

        std::vector<double> dS(size, 0.0);
        for (size_t i = 0; i < size && !in_.dht.empty(); ++i) dS[i] = in_.dht[first + i];
        for (int64_t t = end_ - 1; t >= begin_; --t) pull(t, before[size_t(t - begin_)], dS);
        for (size_t i = 0; i < size; ++i) out_.dh0[first + i] = dS[i];
    }

private:
    struct Token {
        std::vector<double> q, k, v;
        double q_rstd = 1, k_rstd = 1, decay, slope = 1, log_decay, beta, beta_slope = 1;
    };

    size_t key_row(int64_t t) const { return size_t(((b_ * in_.T + t) * in_.H + h_) * K_); }
    size_t value_row(int64_t t) const { return size_t(((b_ * in_.T + t) * in_.HV + hv_) * V_); }
    size_t gate_at(int64_t t) const { return size_t((b_ * in_.T + t) * in_.HV + hv_); }

    double normalise(std::vector<double> &x) const {
        if (!(in_.flags & CAKE_GDN_QK_L2NORM)) return 1;
        double sum = 0;
        for (double e : x) sum += e * e;
        const double rstd = 1 / std::sqrt(sum + 1e-6);
        for (double &e : x) e *= rstd;
        return rstd;
    }

    Token token(int64_t t) const {
        Token x;
        const auto row = [](const std::vector<double> &from, size_t at, int64_t count) {
            return std::vector<double>(from.begin() + int64_t(at), from.begin() + int64_t(at) + count);
        };
        x.q = row(in_.q, key_row(t), K_);
        x.k = row(in_.k, key_row(t), K_);
        x.v = row(in_.v, value_row(t), V_);
        x.q_rstd = normalise(x.q);
        x.k_rstd = normalise(x.k);
        x.log_decay = in_.g[gate_at(t)];
        if (in_.flags & CAKE_GDN_GATE) {
            const double rate = std::exp(in_.A_log[size_t(hv_)]);
            const double z = x.log_decay + (in_.dt_bias.empty() ? 0 : in_.dt_bias[size_t(hv_)]);
            x.log_decay = -rate * log1p_exp(z);
            x.slope = -rate * logistic(z);
        }
        x.decay = std::exp(x.log_decay);
        x.beta = in_.beta[gate_at(t)];
        if (in_.flags & CAKE_GDN_BETA_SIGMOID) {
            const double top = in_.flags & CAKE_GDN_NEG_EIGVAL ? 2 : 1, s = logistic(x.beta);
            x.beta = top * s;
            x.beta_slope = top * s * (1 - s);
        }
        return x;
    }

    // v - (decay S)^T k
    std::vector<double> missing(const Token &x, const std::vector<double> &S) const {
        std::vector<double> y = x.v;
        for (int64_t i = 0; i < K_; ++i) {
            for (int64_t j = 0; j < V_; ++j) y[size_t(j)] -= x.decay * S[size_t(i * V_ + j)] * x.k[size_t(i)];
        }
        return y;
    }

    void write(const Token &x, const std::vector<double> &y, std::vector<double> &S) const {
        for (int64_t i = 0; i < K_; ++i) {
            for (int64_t j = 0; j < V_; ++j) {
                double &s = S[size_t(i * V_ + j)];
                s = x.decay * s + x.k[size_t(i)] * x.beta * y[size_t(j)];
            }
        }
    }

    void step(int64_t t, std::vector<double> &S) {
        const Token x = token(t);
        write(x, missing(x, S), S);
        for (int64_t j = 0; j < V_; ++j) {
            double sum = 0;
            for (int64_t i = 0; i < K_; ++i) sum += S[size_t(i * V_ + j)] * x.q[size_t(i)];
            out_.o[value_row(t) + size_t(j)] = in_.scale * sum;
        }
    }

    void add_key_gradient(std::vector<double> &to, int64_t t, const std::vector<double> &gradient,
                          const std::vector<double> &normalised, double rstd) const {
        double along = 0;
        if (in_.flags & CAKE_GDN_QK_L2NORM) {
            for (int64_t i = 0; i < K_; ++i) along += gradient[size_t(i)] * normalised[size_t(i)];
        }
        for (int64_t i = 0; i < K_; ++i) {
            to[key_row(t) + size_t(i)] += rstd * (gradient[size_t(i)] - normalised[size_t(i)] * along);
        }
    }

    // dS: gradient of the state after token t, then of the state before it.
    void pull(int64_t t, const std::vector<double> &before, std::vector<double> &dS) {
        const Token x = token(t);
        const std::vector<double> y = missing(x, before);
        std::vector<double> after = before, dq(size_t(K_), 0.0), dk(size_t(K_), 0.0), dr(size_t(V_), 0.0);
        write(x, y, after);
        for (int64_t i = 0; i < K_; ++i) {
            for (int64_t j = 0; j < V_; ++j) {
                const size_t at = size_t(i * V_ + j);
                const double d_o = in_.d_o.empty() ? 0 : in_.scale * in_.d_o[value_row(t) + size_t(j)];
                dq[size_t(i)] += after[at] * d_o;
                dS[at] += x.q[size_t(i)] * d_o;
                dr[size_t(j)] += dS[at] * x.k[size_t(i)];
                dk[size_t(i)] += dS[at] * x.beta * y[size_t(j)];
            }
        }
        double dbeta = 0, ddecay = 0;
        for (int64_t j = 0; j < V_; ++j) {
            dbeta += dr[size_t(j)] * y[size_t(j)];
            out_.dv[value_row(t) + size_t(j)] = x.beta * dr[size_t(j)];
        }
        for (int64_t i = 0; i < K_; ++i) {
            for (int64_t j = 0; j < V_; ++j) {
                const size_t at = size_t(i * V_ + j);
                const double dy = x.beta * dr[size_t(j)];
                dk[size_t(i)] -= x.decay * before[at] * dy;
                const double through = dS[at] - x.k[size_t(i)] * dy;  // gradient of the decayed state
                ddecay += through * before[at];
                dS[at] = x.decay * through;
            }
        }
        const double dlog = x.decay == 0 ? 0 : x.decay * ddecay;
        out_.dg[gate_at(t)] = dlog == 0 ? 0 : dlog * x.slope;
        out_.dbeta[gate_at(t)] = dbeta * x.beta_slope;
        if (in_.flags & CAKE_GDN_GATE) {
            out_.dA_log[size_t(hv_)] += dlog == 0 ? 0 : dlog * x.log_decay;
            out_.ddt_bias[size_t(hv_)] += out_.dg[gate_at(t)];
        }
        add_key_gradient(out_.dq, t, dq, x.q, x.q_rstd);
        add_key_gradient(out_.dk, t, dk, x.k, x.k_rstd);
    }

    const Inputs &in_;
    Results &out_;
    int64_t n_, hv_, h_, K_, V_, b_, begin_, end_;
};

}  // namespace

Results recurrence(const Inputs &in) {
    Results out;
    for (std::vector<double> *gates : {&out.dg, &out.dbeta}) gates->assign(in.g.size(), 0.0);
    for (std::vector<double> *keys : {&out.dq, &out.dk}) keys->assign(in.q.size(), 0.0);
    for (std::vector<double> *values : {&out.o, &out.dv}) values->assign(in.v.size(), 0.0);
    for (std::vector<double> *heads : {&out.dA_log, &out.ddt_bias}) {
        heads->assign(in.flags & CAKE_GDN_GATE ? size_t(in.HV) : 0, 0.0);
    }
    for (std::vector<double> *states : {&out.final_state, &out.dh0}) {
        states->assign(size_t(in.N * in.HV * in.K * in.V), 0.0);
    }
    for (int64_t n = 0; n < in.N; ++n) {
        for (int64_t hv = 0; hv < in.HV; ++hv) Walk(in, out, n, hv).run();
    }
    return out;
}

}  // namespace cake_gdn_test
