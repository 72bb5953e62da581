// The operator on a GPU: the order of the programs and what flows between them. Host work is filling params structs; one
// call queues everything on the caller's stream.
#include "cuda/backend.hpp"
#include "cuda/call.hpp"
#include "cuda/launch.hpp"
#include "cuda/programs.hpp"

namespace cake_gdn::cuda {

namespace {

class Chain : Call {
public:
    Chain(const cake_gdn_problem &problem, const plan::GpuPlan &plan, void *workspace, void *stream)
        : Call(problem, plan, workspace, stream) {}

    void forward() {
        prepare(false);
        for (int64_t begin = 0; begin < p_.HV; begin += plan_.scan_heads) {
            scan_begin_ = begin, scan_heads_ = std::min(plan_.scan_heads, p_.HV - begin);
            head_begin_ = begin, heads_ = scan_heads_;
            wy(p_.A.data);
            if (cut()) fwd_prescan(), stitch(false);
            fwd_scan(true);
            output();
        }
    }

    void backward() {
        prepare(true);
        for (int64_t begin = 0; begin < p_.HV; begin += plan_.scan_heads) {
            scan_begin_ = begin, scan_heads_ = std::min(plan_.scan_heads, p_.HV - begin);
            head_begin_ = begin, heads_ = scan_heads_;
            if (p_.h.data) {
                wy_recompute();
            } else {
                wy(at(plan_.A));
                if (cut()) fwd_prescan(), stitch(false);
                fwd_scan(false);
            }
            dv_local();
            if (cut()) adjoint_prescan(), stitch(true);
            adjoint_scan();
            if (plan_.tail_fused) {
                tail();
                continue;
            }
            const int64_t end = begin + scan_heads_;
            for (head_begin_ = begin; head_begin_ < end; head_begin_ += heads_) {
                heads_ = std::min(plan_.tail_heads, end - head_begin_);
                dqkwg();
                wy_backward();
                finalize(p_.dq, at(plan_.dq), packed_q(), at(plan_.q_rstd));
                finalize(p_.dk, at(plan_.dk), packed_k(), at(plan_.k_rstd));
            }
        }
        gates_backward();
    }

private:
    void pack(const cake_gdn_tensor &t, void *to, const plan::Buffer &rstd, int64_t heads, int64_t columns,
              bool normalise) const {
        if (to == nullptr) return;
        if (t.data == nullptr) {  // an absent gradient: zeros
            const size_t bytes = 2 * static_cast<size_t>(tokens() * heads * plan::row_width(columns));
            check(cudaMemsetAsync(to, 0, bytes, static_cast<cudaStream_t>(stream_)), "cudaMemsetAsync");
            return;
        }
        cake_gdn_pack_params s{};
        s.device = p_.device, s.dtype = p_.q.dtype, s.normalise = normalise;
        s.B = p_.B, s.T = p_.T, s.heads = heads, s.columns = columns;
        s.x = t.data;
        s.x_batch = t.stride[0], s.x_token = t.stride[1], s.x_head = t.stride[2], s.x_column = t.stride[3];
        s.out = to;
        s.rstd = as<float>(rstd);
        run_pack(s, stream_);
    }

    void prepare(bool backward) {
        cake_gdn_tables_params t{};
        t.cu_seqlens = p_.cu_seqlens.data, t.cu_seqlens_dtype = p_.cu_seqlens.dtype, t.device = p_.device;
        t.B = p_.B, t.T = p_.T, t.N = p_.N;
        t.segment_chunks = plan_.segment_chunks;
        t.max_chunks = plan_.max_chunks, t.max_segments = plan_.max_segments;
        t.offsets = as<int64_t>(plan_.offsets);
        t.sequence_chunk = as<int64_t>(plan_.sequence_chunk);
        t.sequence_segment = as<int64_t>(plan_.sequence_segment);
        t.chunks = as<cake_gdn_chunk>(plan_.chunks);
        t.segments = as<cake_gdn_segment>(plan_.segments);
        run_tables(t, stream_);

        head_begin_ = scan_begin_ = 0, heads_ = scan_heads_ = p_.HV;
        auto s = stage<cake_gdn_prep_params>();
        set_gate_inputs(s);
        s.cum = as<float>(plan_.cum);
        s.reset = as<uint8_t>(plan_.reset);
        s.step = as<float>(plan_.step);
        run_prep(s, stream_);

        const bool normalise = has(CAKE_GDN_QK_L2NORM);
        pack(p_.q, packed_q(), plan_.q_rstd, p_.H, p_.K, normalise);
        pack(p_.k, packed_k(), plan_.k_rstd, p_.H, p_.K, normalise);
        pack(p_.v, at(plan_.v), {}, p_.HV, p_.V, false);
        if (backward) pack(p_.d_o, at(plan_.d_o), {}, p_.HV, p_.V, false);
    }

    void wy(void *A) const {
        auto s = stage<cake_gdn_wy_params>();
        CAKE_GDN_SET_ROWS(s, k);
        CAKE_GDN_SET_ROWS(s, v);
        set_gates(s);
        s.step = as<const float>(plan_.step);
        s.A = A, s.w = at(plan_.w), s.u = at(plan_.u);
        s.bound = as<float>(plan_.bound);
        run_wy(s, stream_);
    }

    void wy_recompute() const {
        auto s = stage<cake_gdn_wy_recompute_params>();
        CAKE_GDN_SET_ROWS(s, k);
        CAKE_GDN_SET_ROWS(s, v);
        set_gates(s);
        CAKE_GDN_SET_STATE(s, initial_state, p_.initial_state);
        s.step = as<const float>(plan_.step);
        s.A = p_.A.data, s.h = p_.h.data, s.w = at(plan_.w), s.v_new = at(plan_.u);
        s.bound = as<float>(plan_.bound);
        run_wy_recompute(s, stream_);
    }

    void fwd_prescan() const {
        auto s = stage<cake_gdn_fwd_prescan_params>();
        set_prescan(s);
        CAKE_GDN_SET_ROWS(s, k);
        set_gates(s);
        s.w = at(plan_.w), s.u = at(plan_.u);
        run_fwd_prescan(s, stream_);
    }

    void adjoint_prescan() const {
        auto s = stage<cake_gdn_adjoint_prescan_params>();
        s.scale = static_cast<float>(p_.scale);
        set_prescan(s);
        CAKE_GDN_SET_ROWS(s, q);
        CAKE_GDN_SET_ROWS(s, k);
        CAKE_GDN_SET_ROWS(s, d_o);
        set_gates(s);
        s.w = at(plan_.w), s.dv = du();
        run_adjoint_prescan(s, stream_);
    }

    void stitch(bool backward) const {
        auto s = stage<cake_gdn_stitch_params>();
        s.backward = backward;
        set_segments(s);
        s.transitions = at(plan_.transitions), s.forgotten = as<const uint8_t>(plan_.forgotten);
        CAKE_GDN_SET_STATE(s, start, backward ? p_.dht : p_.initial_state);
        run_stitch(s, stream_);
    }

    void fwd_scan(bool with_final_state) const {
        auto s = stage<cake_gdn_fwd_scan_params>();
        set_segments(s);
        CAKE_GDN_SET_ROWS(s, k);
        set_gates(s);
        CAKE_GDN_SET_STATE(s, initial_state, p_.initial_state);
        if (with_final_state) CAKE_GDN_SET_STATE(s, final_state, p_.final_state);
        s.w = at(plan_.w), s.u = at(plan_.u);
        set_states(s);
        run_fwd_scan(s, stream_);
    }

    void output() const {
        auto s = stage<cake_gdn_output_params>();
        s.scale = static_cast<float>(p_.scale);
        CAKE_GDN_SET_ROWS(s, q);
        CAKE_GDN_SET_ROWS(s, k);
        set_gates(s);
        CAKE_GDN_SET_STATE(s, initial_state, p_.initial_state);
        s.v_new = at(plan_.u);
        set_states(s);
        CAKE_GDN_SET_OUTPUT(s, o, p_.o);
        run_output(s, stream_);
    }

    void dv_local() const {
        auto s = stage<cake_gdn_dv_local_params>();
        s.scale = static_cast<float>(p_.scale);
        CAKE_GDN_SET_ROWS(s, q);
        CAKE_GDN_SET_ROWS(s, k);
        CAKE_GDN_SET_ROWS(s, d_o);
        set_gates(s);
        s.dv = du();
        run_dv_local(s, stream_);
    }

    void adjoint_scan() const {
        auto s = stage<cake_gdn_adjoint_scan_params>();
        s.scale = static_cast<float>(p_.scale);
        set_segments(s);
        CAKE_GDN_SET_ROWS(s, q);
        CAKE_GDN_SET_ROWS(s, k);
        CAKE_GDN_SET_ROWS(s, d_o);
        set_gates(s);
        CAKE_GDN_SET_STATE(s, dht, p_.dht);
        CAKE_GDN_SET_STATE(s, dh0, p_.dh0);
        s.w = at(plan_.w), s.dv = du(), s.dh = at(plan_.dh);
        run_adjoint_scan(s, stream_);
    }

    void dqkwg() const {
        auto s = stage<cake_gdn_dqkwg_params>();
        s.scale = static_cast<float>(p_.scale);
        CAKE_GDN_SET_ROWS(s, q);
        CAKE_GDN_SET_ROWS(s, k);
        CAKE_GDN_SET_ROWS(s, d_o);
        set_gates(s);
        CAKE_GDN_SET_STATE(s, initial_state, p_.initial_state);
        CAKE_GDN_SET_STATE(s, dht, p_.dht);
        s.v_new = at(plan_.u), s.du = du(), s.dh = at(plan_.dh);
        set_states(s);
        s.dq = at(plan_.dq), s.dk = at(plan_.dk), s.dw = at(plan_.dw);
        s.dcum = as<float>(plan_.dcum);
        run_dqkwg(s, stream_);
    }

    void wy_backward() const {
        auto s = stage<cake_gdn_wy_backward_params>();
        CAKE_GDN_SET_ROWS(s, k);
        CAKE_GDN_SET_ROWS(s, v);
        set_gates(s);
        s.step = as<const float>(plan_.step);
        s.A = p_.h.data ? p_.A.data : at(plan_.A);
        s.v_new = at(plan_.u), s.dw = at(plan_.dw), s.du = du(), s.dk = at(plan_.dk);
        CAKE_GDN_SET_OUTPUT(s, dv, p_.dv);
        s.dstep = as<float>(plan_.dstep), s.dcum = as<float>(plan_.dcum);
        run_wy_backward(s, stream_);
    }

    // dq or dk of the tail slice's key heads.
    void finalize(const cake_gdn_tensor &to, const void *parts, const void *x, const void *rstd) const {
        if (to.data == nullptr) return;
        const int64_t group = p_.HV / p_.H, first = head_begin_ / group, width = plan::row_width(p_.K);
        cake_gdn_finalize_params s{};
        s.device = p_.device, s.dtype = p_.q.dtype;
        s.B = p_.B, s.T = p_.T, s.H = heads_ / group, s.group = group, s.K = p_.K;
        s.parts = parts;
        if (has(CAKE_GDN_QK_L2NORM)) {
            s.x = static_cast<const char *>(x) + 2 * first * width;
            s.rstd = static_cast<const float *>(rstd) + first;
        }
        s.x_heads = p_.H;
        CAKE_GDN_SET_OUTPUT(s, dx, to);
        s.dx = static_cast<char *>(to.data) + 2 * first * to.stride[2];
        run_finalize(s, stream_);
    }

    void tail() const {
        auto s = stage<cake_gdn_tail_params>();
        s.scale = static_cast<float>(p_.scale);
        CAKE_GDN_SET_ROWS(s, q);
        CAKE_GDN_SET_ROWS(s, k);
        CAKE_GDN_SET_ROWS(s, v);
        CAKE_GDN_SET_ROWS(s, d_o);
        set_gates(s);
        CAKE_GDN_SET_STATE(s, initial_state, p_.initial_state);
        CAKE_GDN_SET_STATE(s, dht, p_.dht);
        s.step = as<const float>(plan_.step);
        s.A = p_.h.data ? p_.A.data : at(plan_.A);
        s.v_new = at(plan_.u), s.du = du(), s.dh = at(plan_.dh);
        set_states(s);
        s.q_rstd = as<const float>(plan_.q_rstd), s.k_rstd = as<const float>(plan_.k_rstd);
        CAKE_GDN_SET_OUTPUT(s, dq, p_.dq);
        CAKE_GDN_SET_OUTPUT(s, dk, p_.dk);
        CAKE_GDN_SET_OUTPUT(s, dv, p_.dv);
        s.dstep = as<float>(plan_.dstep), s.dcum = as<float>(plan_.dcum);
        run_tail(s, stream_);
    }

    void gates_backward() {
        head_begin_ = scan_begin_ = 0, heads_ = scan_heads_ = p_.HV;
        auto s = stage<cake_gdn_gate_backward_params>();
        set_gate_inputs(s);
        set_gates(s);
        s.dcum = as<const float>(plan_.dcum), s.dstep = as<const float>(plan_.dstep);
        s.dg = p_.dg.data, s.dg_dtype = p_.dg.dtype;
        s.dg_batch = p_.dg.stride[0], s.dg_token = p_.dg.stride[1], s.dg_head = p_.dg.stride[2];
        s.dbeta = p_.dbeta.data, s.dbeta_dtype = p_.dbeta.dtype;
        s.dbeta_batch = p_.dbeta.stride[0], s.dbeta_token = p_.dbeta.stride[1], s.dbeta_head = p_.dbeta.stride[2];
        s.partials = as<float>(plan_.partials);
        if (s.dg || s.dbeta || p_.dA_log.data || p_.ddt_bias.data) run_gate_backward(s, stream_);
        if (!p_.dA_log.data && !p_.ddt_bias.data) return;
        auto r = stage<cake_gdn_gate_reduce_params>();
        r.partials = as<const float>(plan_.partials);
        r.dA_log = p_.dA_log.data, r.dA_log_dtype = p_.dA_log.dtype, r.dA_log_stride = p_.dA_log.stride[0];
        r.ddt_bias = p_.ddt_bias.data, r.ddt_bias_dtype = p_.ddt_bias.dtype, r.ddt_bias_stride = p_.ddt_bias.stride[0];
        run_gate_reduce(r, stream_);
    }
};

}  // namespace

void run(const cake_gdn_problem &problem, const plan::GpuPlan &plan, cake_gdn_direction direction, void *workspace,
         void *stream) {
    if (reinterpret_cast<uintptr_t>(workspace) % plan::kGpuAlignment != 0) {
        throw Error(CAKE_GDN_INVALID_ARGUMENT, "workspace must start at a multiple of 256 bytes");
    }
    const DeviceGuard guard(problem.device);
    Chain chain(problem, plan, workspace, stream);
    if (direction == CAKE_GDN_FORWARD) {
        chain.forward();
    } else {
        chain.backward();
    }
}

}  // namespace cake_gdn::cuda
