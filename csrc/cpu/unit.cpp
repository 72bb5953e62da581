// The chunked algorithm for one (sequence, key head) pair. Compiled once per instruction set: CAKE_GDN_UNIT names it.
//
// One chunk of L <= 64 tokens and one value head, S the state before it (k, q normalised when asked for; gates.hpp has
// the gates: e_i from the start, d_i to the end, G_ij between tokens):
//
//   y_i = v_i - e_i S^T k_i            what the keys find missing before the chunk's own writes
//   u   = (I + tril(beta_i G_ij k_i.k_j, -1))^-1 (beta y)       by substitution
//   o_i = scale (e_i S^T q_i + sum_{j<=i} G_ij (q_i.k_j) u_j)
//   S'  = e_last S + sum_j d_j k_j u_j^T
//
// and its pullback, with dS' the gradient of S', do scaled, P_ij = G_ij q_i.k_j, M the matrix above:
//
//   du = P^T do + d (k dS');   dr = M^-T du;   dv = beta dr
//   dM = -tril(dr u^T, -1);    dP = tril(do u^T);   W = beta G dM;   Z = G dP
//   dq = e (S do) + Z k
//   dk = -beta e (S dr) + d (dS' u) + (W + W^T) k + Z^T q
//   dS = e_last dS' + q^T (e do) - k^T (beta e dr)
//   dbeta_i = dr_i.y_i + sum_{j<i} dM_ij G_ij k_i.k_j
//   dg_t = sum over everything that reaches across t: pairs j < t <= i of W_ij k_i.k_j + Z_ij q_i.k_j, state to token
//          i >= t, token j < t to final state, and state to final state
//
// The last form needs no difference of large sums: the diagonal of P and the last token's own product with dS', which
// cancel in the textbook form, never enter.
//
// Sums over tokens and columns ascend (gemm.hpp); value heads of a group add into dq and dk in head order.
#include "cpu/engine.hpp"
#include "cpu/gates.hpp"
#include "cpu/gemm.hpp"

#define CAKE_GDN_CONCAT_(a, b) a##b
#define CAKE_GDN_CONCAT(a, b) CAKE_GDN_CONCAT_(a, b)
#define CAKE_GDN_TEXT_(a) #a
#define CAKE_GDN_TEXT(a) CAKE_GDN_TEXT_(a)

namespace cake_gdn::cpu {
namespace {

template <class T>
class Pair {
public:
    Pair(const Call &call, int64_t index, char *scratch)
        : p_(*call.problem),
          call_(call),
          s_(call.plan->scratch),
          base_(scratch),
          Kp_(s_.Kp),
          Vp_(s_.Vp),
          group_(p_.HV / p_.H),
          n_(index / p_.H),
          h_(index % p_.H),
          seq_(sequence(p_, n_)),
          chunks_(plan::ceil_div(seq_.length, C)) {}

    void forward() {
        load_states(state(), p_.initial_state);
        for (int64_t c = 0; c < chunks_; ++c) {
            load_chunk(c, true);
            for (int64_t i = 0; i < group_; ++i) {
                if (c > 0 && p_.h.data) save_state(c, i);
                correct_values(i, nullptr);
                if (p_.o.data) output(i);
                advance(i);
            }
        }
        store_states(p_.final_state, state());
    }

    void backward() {
        if (p_.dht.data) {
            load_states(dstate(), p_.dht);
        } else {
            clear(dstate(), group_ * Kp_ * Vp_);
        }
        if (call_.gate_partials) clear(gate_partial(0), 2 * group_);
        const int64_t segment = call_.plan->segment;
        if (!p_.h.data) checkpoint_states(segment);
        for (int64_t end = chunks_; end > 0;) {
            const int64_t begin = p_.h.data ? 0 : (end - 1) / segment * segment;
            if (!p_.h.data) recompute_states(begin, end, segment);
            for (int64_t c = end - 1; c >= begin; --c) {
                load_chunk(c, true);
                clear(dq(), C * Kp_);
                clear(dk(), C * Kp_);
                for (int64_t i = 0; i < group_; ++i) pullback(i, starting_state(c, i, begin));
                store_key_gradients();
            }
            end = begin;
        }
        store_states(p_.dh0, dstate());
    }

private:
    // ---- geometry and scratch -----------------------------------------------------------------------------------

    T *at(const plan::Buffer &b) { return reinterpret_cast<T *>(base_ + b.offset); }
    T *q() { return at(s_.q); }
    T *k() { return at(s_.k); }
    T *kt() { return at(s_.kt); }
    T *kk() { return at(s_.kk); }
    T *qk() { return at(s_.qk); }
    T *decay() { return at(s_.decay); }
    T *lower() { return at(s_.lower); }
    T *pairs() { return at(s_.pairs); }
    T *x() { return at(s_.x); }
    T *u() { return at(s_.u); }
    T *y() { return at(s_.y); }
    T *d_o() { return at(s_.d_o); }
    T *du() { return at(s_.du); }
    T *ut() { return at(s_.ut); }
    T *zq() { return at(s_.zq); }
    T *wk() { return at(s_.wk); }
    T *dq() { return at(s_.dq); }
    T *dk() { return at(s_.dk); }
    T *st() { return at(s_.st); }
    T *dst() { return at(s_.dst); }
    T *state(int64_t i = 0) { return at(s_.state) + i * Kp_ * Vp_; }
    T *dstate(int64_t i = 0) { return at(s_.dstate) + i * Kp_ * Vp_; }
    T *kept(const plan::Buffer &b, int64_t c, int64_t i) { return at(b) + (c * group_ + i) * Kp_ * Vp_; }
    double *gate_partial(int64_t i) { return call_.gate_partials + 2 * (n_ * p_.HV + value_head(i)); }
    int64_t value_head(int64_t i) const { return h_ * group_ + i; }

    template <class X>
    static void clear(X *to, int64_t count) {
        for (int64_t i = 0; i < count; ++i) to[i] = X(0);
    }
    static void copy(T *to, const T *from, int64_t count) {
        for (int64_t i = 0; i < count; ++i) to[i] = from[i];
    }

    // The chunk's rows of a [B, T, heads, columns] tensor.
    View rows(const cake_gdn_tensor &t, int64_t head) const {
        return {t.data, t.dtype, seq_.b * t.stride[0] + token_ * t.stride[1] + head * t.stride[2], t.stride[1],
                t.stride[3]};
    }
    View state_view(const cake_gdn_tensor &t, int64_t i) const {
        const bool v_first = p_.flags & CAKE_GDN_STATE_V_FIRST;
        return {t.data, t.dtype, n_ * t.stride[0] + value_head(i) * t.stride[1], t.stride[v_first ? 3 : 2],
                t.stride[v_first ? 2 : 3]};
    }

    // ---- states -------------------------------------------------------------------------------------------------

    void load_states(T *to, const cake_gdn_tensor &from) {
        for (int64_t i = 0; i < group_; ++i) {
            T *target = to + i * Kp_ * Vp_;
            if (from.data) {
                load_rows(target, Vp_, state_view(from, i), p_.K, p_.V, Kp_);
            } else {
                clear(target, Kp_ * Vp_);
            }
        }
    }

    void store_states(const cake_gdn_tensor &to, const T *from) {
        if (!to.data) return;
        for (int64_t i = 0; i < group_; ++i) store_rows(state_view(to, i), from + i * Kp_ * Vp_, Vp_, p_.K, p_.V);
    }

    View saved(int64_t c, int64_t i) const {
        const int64_t slot = plan::state_slot(seq_.b, p_.T, seq_.begin + c * C);
        return {p_.h.data, p_.h.dtype, (slot * p_.HV + value_head(i)) * p_.K * p_.V, p_.V, 1};
    }
    void save_state(int64_t c, int64_t i) { store_rows(saved(c, i), state(i), Vp_, p_.K, p_.V); }

    // The state before chunk c, for the pullback; chunks from `begin` on have been recomputed when nothing was saved.
    const T *starting_state(int64_t c, int64_t i, int64_t begin) {
        if (!p_.h.data) return kept(s_.states, c - begin, i);
        if (c > 0) {
            load_rows(state(i), Vp_, saved(c, i), p_.K, p_.V, Kp_);
        } else if (p_.initial_state.data) {
            load_rows(state(i), Vp_, state_view(p_.initial_state, i), p_.K, p_.V, Kp_);
        } else {
            clear(state(i), Kp_ * Vp_);
        }
        return state(i);
    }

    void step(int64_t c) {
        load_chunk(c, false);
        for (int64_t i = 0; i < group_; ++i) {
            correct_values(i, nullptr);
            advance(i);
        }
    }

    // Keeps the states before the chunks 0, segment, 2 segment, ...
    void checkpoint_states(int64_t segment) {
        load_states(state(), p_.initial_state);
        for (int64_t c = 0; c < chunks_; ++c) {
            if (c % segment == 0) copy(kept(s_.checkpoints, c / segment, 0), state(), group_ * Kp_ * Vp_);
            if (c / segment < (chunks_ - 1) / segment) step(c);  // the last segment's states are not needed here
        }
    }

    void recompute_states(int64_t begin, int64_t end, int64_t segment) {
        copy(state(), kept(s_.checkpoints, begin / segment, 0), group_ * Kp_ * Vp_);
        for (int64_t c = begin; c < end; ++c) {
            copy(kept(s_.states, c - begin, 0), state(), group_ * Kp_ * Vp_);
            if (c + 1 < end) step(c);
        }
    }

    // ---- one chunk ----------------------------------------------------------------------------------------------

    // Keys, queries and their products, shared by the value heads of the group.
    void load_chunk(int64_t c, bool with_queries) {
        token_ = seq_.begin + c * C;
        L_ = int(lesser(C, seq_.length - c * C));
        M_ = plan::round_up(L_, kTileRows);
        load_rows(k(), Kp_, rows(p_.k, h_), L_, p_.K, C);
        if (normalise()) normalise_rows(k(), k_rstd_);
        transpose(kt(), C, k(), Kp_, C, Kp_);
        gemm<Part::lower_result>(kk(), C, rows_of(k(), Kp_), kt(), C, M_, C, p_.K, T(0));
        if (!with_queries) return;
        load_rows(q(), Kp_, rows(p_.q, h_), L_, p_.K, C);
        if (normalise()) normalise_rows(q(), q_rstd_);
        gemm<Part::lower_result>(qk(), C, rows_of(q(), Kp_), kt(), C, M_, C, p_.K, T(0));
    }

    bool normalise() const { return p_.flags & CAKE_GDN_QK_L2NORM; }

    void normalise_rows(T *matrix, T *rstd) {
        for (int i = 0; i < L_; ++i) {
            T *row = matrix + i * Kp_;
            rstd[i] = T(1) / square_root(dot(row, row, Kp_) + T(1e-6));
            scale_row(row, rstd[i], Kp_);
        }
    }

    // to[i, j] = f(i, j) below the diagonal, or on it too, by whole vectors; zero elsewhere and from row L on.
    template <class F>
    void fill_lower(T *to, bool diagonal, F &&f) {
        const IndexVec<T> lanes = lane_index<T>();
        for (int i = 0; i < C; ++i) {
            for (int j = 0; j < C; j += kLanes<T>) {
                Vec<T> value = {};
                if (i < L_ && j <= i) value = lanes + j < i + int(diagonal) ? f(i, j) : value;
                store(to + i * C + j, value);
            }
        }
    }

    // row_i *= factor_i; a zero factor clears the row whatever it holds.
    void scale_rows(T *matrix, int64_t pitch, const T *factor) {
        for (int64_t i = 0; i < M_; ++i) {
            if (factor[i] == T(0)) {
                clear(matrix + i * pitch, pitch);
            } else {
                scale_row(matrix + i * pitch, factor[i], pitch);
            }
        }
    }

    // u from the state before the chunk; also y when asked for.
    void correct_values(int64_t i, T *y_out) { correct_values(i, state(i), y_out); }

    void correct_values(int64_t i, const T *from, T *y_out) {
        load_gates(gates_, p_, seq_.b, token_, value_head(i), L_);
        fill_decay(decay(), gates_, L_);
        gemm(x(), Vp_, rows_of(k(), Kp_), from, Vp_, M_, Vp_, p_.K, T(0));
        scale_rows(x(), Vp_, gates_.from_start);
        load_rows(u(), Vp_, rows(p_.v, value_head(i)), L_, p_.V, C);
        for (int64_t r = 0; r < L_; ++r) {
            T *value = u() + r * Vp_;
            add_scaled(value, x() + r * Vp_, T(-1), Vp_);
            if (y_out) copy(y_out + r * Vp_, value, Vp_);
            scale_row(value, gates_.beta[r], Vp_);
        }
        fill_lower(lower(), false, [&](int r, int j) {
            return -gates_.beta[r] * (load(decay() + r * C + j) * load(kk() + r * C + j));
        });
        solve<false>(u(), Vp_, lower(), C, M_, Vp_);
    }

    void scores(T *to) {
        fill_lower(to, true, [&](int r, int j) { return load(decay() + r * C + j) * load(qk() + r * C + j); });
    }

    void output(int64_t i) {
        scores(lower());  // the solve is done with its matrix
        gemm(x(), Vp_, rows_of(q(), Kp_), state(i), Vp_, M_, Vp_, p_.K, T(0));
        scale_rows(x(), Vp_, gates_.from_start);
        gemm<Part::lower_left>(x(), Vp_, rows_of(lower(), C), u(), Vp_, M_, Vp_, L_, T(1));
        for (int64_t r = 0; r < L_; ++r) scale_row(x() + r * Vp_, T(p_.scale), Vp_);
        store_rows(rows(p_.o, value_head(i)), x(), Vp_, L_, p_.V);
    }

    void advance(int64_t i) {
        copy(x(), u(), M_ * Vp_);
        scale_rows(x(), Vp_, gates_.to_end);
        gemm(state(i), Vp_, columns_of(k(), Kp_), x(), Vp_, Kp_, Vp_, L_, gates_.whole);
    }

    // ---- the pullback of one chunk ------------------------------------------------------------------------------

    void pullback(int64_t i, const T *S) {
        const int64_t hv = value_head(i);
        T *dS = dstate(i);
        correct_values(i, S, y());

        // du = P^T do + d (k dS'), and what each token's way to the final state weighs in the gate's gradient.
        if (p_.d_o.data) {
            load_rows(d_o(), Vp_, rows(p_.d_o, hv), L_, p_.V, C);
            for (int64_t r = 0; r < L_; ++r) scale_row(d_o() + r * Vp_, T(p_.scale), Vp_);
        } else {
            clear(d_o(), C * Vp_);
        }
        gemm(du(), Vp_, rows_of(k(), Kp_), dS, Vp_, M_, Vp_, p_.K, T(0));
        scale_rows(du(), Vp_, gates_.to_end);
        for (int64_t r = 0; r < L_; ++r) to_final_[r] = dot(du() + r * Vp_, u() + r * Vp_, Vp_);
        scores(zq());
        gemm<Part::upper_left>(du(), Vp_, columns_of(zq(), C), d_o(), Vp_, M_, Vp_, L_, T(1));
        solve<true>(du(), Vp_, lower(), C, M_, Vp_);  // now dr

        if (p_.dv.data) {
            for (int64_t r = 0; r < L_; ++r) {
                copy(x() + r * Vp_, du() + r * Vp_, Vp_);
                scale_row(x() + r * Vp_, gates_.beta[r], Vp_);
            }
            store_rows(rows(p_.dv, hv), x(), Vp_, L_, p_.V);
        }
        score_gradients(hv);
        key_gradients(S, dS);
        gate_gradients(i, S, dS);

        // dS = e_last dS' + q^T (e do) - k^T (beta e dr)
        scale_rows(d_o(), Vp_, gates_.from_start);
        for (int r = 0; r < C; ++r) minus_beta_e_[r] = -gates_.beta[r] * gates_.from_start[r];
        scale_rows(du(), Vp_, minus_beta_e_);
        gemm(dS, Vp_, columns_of(q(), Kp_), d_o(), Vp_, Kp_, Vp_, L_, gates_.whole);
        gemm(dS, Vp_, columns_of(k(), Kp_), du(), Vp_, Kp_, Vp_, L_, T(1));
    }

    // W, Z, the pairs' weights in the gate's gradient, and dbeta.
    void score_gradients(int64_t hv) {
        transpose(ut(), C, u(), Vp_, C, Vp_);
        gemm<Part::lower_result>(wk(), C, rows_of(du(), Vp_), ut(), C, M_, C, p_.V, T(0));
        gemm<Part::lower_result>(zq(), C, rows_of(d_o(), Vp_), ut(), C, M_, C, p_.V, T(0));
        fill_lower(wk(), false, [&](int r, int j) { return -load(decay() + r * C + j) * load(wk() + r * C + j); });
        fill_lower(zq(), true, [&](int r, int j) { return load(decay() + r * C + j) * load(zq() + r * C + j); });
        for (int r = 0; r < L_; ++r) {
            // wk holds G dM here: its product with k.k is the chunk's own part of dbeta.
            T own = T(0);
            for (int j = 0; j < r; ++j) own += wk()[r * C + j] * kk()[r * C + j];
            dbeta_[r] = (dot(du() + r * Vp_, y() + r * Vp_, Vp_) + own) * T(gates_.dbeta_dinput[r]);
            scale_row(wk() + r * C, gates_.beta[r], C);
        }
        fill_lower(pairs(), false, [&](int r, int j) {
            return load(wk() + r * C + j) * load(kk() + r * C + j) + load(zq() + r * C + j) * load(qk() + r * C + j);
        });
        store_scalars(p_.dbeta, hv, dbeta_);
    }

    void key_gradients(const T *S, const T *dS) {
        // The rows of x are S do, S dr, dS' u in turn.
        transpose(st(), Kp_, S, Vp_, Kp_, Vp_);
        gemm(x(), Kp_, rows_of(d_o(), Vp_), st(), Kp_, M_, Kp_, p_.V, T(0));
        scale_rows(x(), Kp_, gates_.from_start);
        for (int r = 0; r < L_; ++r) {
            from_initial_[r] = dot(q() + r * Kp_, x() + r * Kp_, Kp_);
            add_scaled(dq() + r * Kp_, x() + r * Kp_, T(1), Kp_);
        }
        gemm(x(), Kp_, rows_of(du(), Vp_), st(), Kp_, M_, Kp_, p_.V, T(0));
        scale_rows(x(), Kp_, gates_.from_start);
        for (int r = 0; r < L_; ++r) {
            from_initial_[r] -= gates_.beta[r] * dot(k() + r * Kp_, x() + r * Kp_, Kp_);
            add_scaled(dk() + r * Kp_, x() + r * Kp_, -gates_.beta[r], Kp_);
        }
        transpose(dst(), Kp_, dS, Vp_, Kp_, Vp_);
        gemm(x(), Kp_, rows_of(u(), Vp_), dst(), Kp_, M_, Kp_, p_.V, T(0));
        scale_rows(x(), Kp_, gates_.to_end);
        for (int r = 0; r < L_; ++r) add_scaled(dk() + r * Kp_, x() + r * Kp_, T(1), Kp_);

        gemm<Part::lower_left>(dq(), Kp_, rows_of(zq(), C), k(), Kp_, M_, Kp_, L_, T(1));
        gemm<Part::upper_left>(dk(), Kp_, columns_of(zq(), C), q(), Kp_, M_, Kp_, L_, T(1));
        gemm<Part::lower_left>(dk(), Kp_, rows_of(wk(), C), k(), Kp_, M_, Kp_, L_, T(1));
        gemm<Part::upper_left>(dk(), Kp_, columns_of(wk(), C), k(), Kp_, M_, Kp_, L_, T(1));
    }

    // dg_t: all that reaches across t. `across` holds, for each j, the pairs (i, j) with i >= t.
    void gate_gradients(int64_t i, const T *S, const T *dS) {
        if (!p_.dg.data && !call_.gate_partials) return;
        double through = 0;
        if (gates_.whole != T(0)) {
            for (int64_t r = 0; r < p_.K; ++r) through += double(dot(S + r * Vp_, dS + r * Vp_, Vp_));
            through *= double(gates_.whole);
        }
        double leaving = 0;  // tokens j < t, to the final state: a sum from the front, so zeros stay exact
        for (int t = 0; t < L_; ++t) {
            dgate_[t] = leaving + through;
            leaving += double(to_final_[t]);
        }
        double reaching = 0;  // tokens i >= t, from the chunk's starting state
        alignas(64) T across[C] = {};
        const IndexVec<T> lanes = lane_index<T>();
        for (int t = L_ - 1; t >= 0; --t) {
            Vec<T> sum = {};
            for (int j = 0; j < C && j <= t; j += kLanes<T>) {
                const Vec<T> column = load(across + j) + load(pairs() + t * C + j);
                store(across + j, column);
                sum += lanes + j < t ? column : Vec<T>{};
            }
            reaching += double(from_initial_[t]);
            dgate_[t] += double(sum_lanes<T>(sum)) + reaching;
        }
        double dA = 0, dbias = 0;
        for (int t = 0; t < L_; ++t) {
            // At a reset the slope is zero and what reaches across it is zero.
            const double dinput = gates_.reset[t] == t ? 0 : dgate_[t] * gates_.draw_dg[t];
            dA += dgate_[t] * gates_.raw[t];
            dbias += dinput;
            dg_[t] = T(dinput);
        }
        store_scalars(p_.dg, value_head(i), dg_);
        if (call_.gate_partials) {
            gate_partial(i)[0] += dA;
            gate_partial(i)[1] += dbias;
        }
    }

    void store_scalars(const cake_gdn_tensor &to, int64_t hv, const T *from) {
        if (!to.data) return;
        const int64_t offset = seq_.b * to.stride[0] + token_ * to.stride[1] + hv * to.stride[2];
        store_rows(View{to.data, to.dtype, offset, to.stride[1], 1}, from, 1, L_, 1);
    }

    // dq and dk of the group, through the normalisation x -> x rstd: dx = rstd (d - x_n (x_n . d)).
    void store_key_gradients() {
        if (normalise()) {
            for (int r = 0; r < L_; ++r) {
                pull_normalisation(dq() + r * Kp_, q() + r * Kp_, q_rstd_[r]);
                pull_normalisation(dk() + r * Kp_, k() + r * Kp_, k_rstd_[r]);
            }
        }
        if (p_.dq.data) store_rows(rows(p_.dq, h_), dq(), Kp_, L_, p_.K);
        if (p_.dk.data) store_rows(rows(p_.dk, h_), dk(), Kp_, L_, p_.K);
    }

    void pull_normalisation(T *gradient, const T *normalised, T rstd) {
        add_scaled(gradient, normalised, -dot(gradient, normalised, Kp_), Kp_);
        scale_row(gradient, rstd, Kp_);
    }

    const cake_gdn_problem &p_;
    const Call &call_;
    const plan::CpuScratch &s_;
    char *base_;
    const int64_t Kp_, Vp_, group_, n_, h_;
    const Sequence seq_;
    const int64_t chunks_;
    int64_t token_ = 0, M_ = 0;  // first token of the chunk; its rows, rounded up to a tile
    int L_ = 0;                  // its tokens
    Gates<T> gates_;
    T q_rstd_[C], k_rstd_[C], to_final_[C], from_initial_[C], minus_beta_e_[C], dbeta_[C], dg_[C];
    double dgate_[C];
};

void run_pair(const Call &call, int64_t index, char *scratch) {
    const auto run = [&](auto &&pair) {
        if (call.direction == CAKE_GDN_FORWARD) {
            pair.forward();
        } else {
            pair.backward();
        }
    };
    if (call.problem->q.dtype == CAKE_GDN_FP64) {
        run(Pair<double>(call, index, scratch));
    } else {
        run(Pair<float>(call, index, scratch));
    }
}

bool supported() {
#if defined(__AVX512F__)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
#elif defined(__AVX2__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return true;
#endif
}

}  // namespace

extern const Unit CAKE_GDN_CONCAT(unit_, CAKE_GDN_UNIT);
const Unit CAKE_GDN_CONCAT(unit_, CAKE_GDN_UNIT) = {CAKE_GDN_TEXT(CAKE_GDN_UNIT), supported, run_pair};

}  // namespace cake_gdn::cpu
