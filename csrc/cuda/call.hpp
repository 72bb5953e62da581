// One call of the operator as its programs' params want it: where tensors, tables and buffers are, by the problem, the plan
// and the workspace; and the slice of value heads that is being worked on.
#pragma once

#include "cuda/stages.h"
#include "plan/plan.hpp"

namespace cake_gdn::cuda {

// The kernels' row width and the plan's are one.
static_assert(plan::row_width(1) == CAKE_GDN_WIDTH(1) && plan::row_width(60) == CAKE_GDN_WIDTH(60) &&
              plan::row_width(128) == CAKE_GDN_WIDTH(128));
static_assert(plan::kTailGroup == CAKE_GDN_TAIL_GROUP);

class Call {
protected:
    Call(const cake_gdn_problem &problem, const plan::GpuPlan &plan, void *workspace, void *stream)
        : p_(problem), plan_(plan), workspace_(static_cast<char *>(workspace)), stream_(stream) {}

    struct RowView {
        void *data;
        int64_t batch, token, head;
    };

    void *at(const plan::Buffer &b) const { return b.bytes > 0 ? workspace_ + b.offset : nullptr; }
    template <class T>
    T *as(const plan::Buffer &b) const {
        return static_cast<T *>(at(b));
    }
    bool has(uint32_t flag) const { return p_.flags & flag; }
    int64_t tokens() const { return p_.B * p_.T; }
    bool cut() const { return plan_.seams > 0; }  // sequences into segments

    // Fields that every program of the chain has.
    template <class Params>
    Params stage() const {
        Params s{};
        s.device = p_.device, s.dtype = p_.q.dtype;
        s.B = p_.B, s.T = p_.T, s.N = p_.N, s.H = p_.H, s.HV = p_.HV, s.K = p_.K, s.V = p_.V;
        s.head_begin = head_begin_, s.heads = heads_;
        s.stored_begin = scan_begin_, s.stored_heads = scan_heads_;
        s.max_chunks = plan_.max_chunks;
        s.chunks = as<const cake_gdn_chunk>(plan_.chunks);
        s.sequence_chunk = as<const int64_t>(plan_.sequence_chunk);
        return s;
    }

    void *packed_q() const { return plan_.q_in_dq ? p_.dq.data : at(plan_.q); }
    void *packed_k() const { return plan_.k_in_dk ? p_.dk.data : at(plan_.k); }
    void *du() const { return plan_.du_in_dv ? p_.dv.data : at(plan_.dv); }

    // A tensor's rows where they are, or where pack left them.
    RowView rows(const cake_gdn_tensor &t, void *packed, int64_t heads, int64_t columns) const {
        if (packed == nullptr) return {t.data, t.stride[0], t.stride[1], t.stride[2]};
        const int64_t width = plan::row_width(columns);
        return {packed, p_.T * heads * width, heads * width, width};
    }
    RowView q() const { return rows(p_.q, packed_q(), p_.H, p_.K); }
    RowView k() const { return rows(p_.k, packed_k(), p_.H, p_.K); }
    RowView v() const { return rows(p_.v, at(plan_.v), p_.HV, p_.V); }
    RowView d_o() const { return rows(p_.d_o, at(plan_.d_o), p_.HV, p_.V); }

#define CAKE_GDN_SET_ROWS(s, name) \
    (s.name = name().data, s.name##_batch = name().batch, s.name##_token = name().token, s.name##_head = name().head)
#define CAKE_GDN_SET_STATE(s, name, tensor)                                                                 \
    (s.name = (tensor).data, s.name##_dtype = (tensor).dtype, s.name##_sequence = (tensor).stride[0],       \
     s.name##_head = (tensor).stride[1], s.name##_k = (tensor).stride[has(CAKE_GDN_STATE_V_FIRST) ? 3 : 2], \
     s.name##_v = (tensor).stride[has(CAKE_GDN_STATE_V_FIRST) ? 2 : 3])
#define CAKE_GDN_SET_OUTPUT(s, name, tensor)                                                           \
    (s.name = (tensor).data, s.name##_batch = (tensor).stride[0], s.name##_token = (tensor).stride[1], \
     s.name##_head = (tensor).stride[2], s.name##_column = (tensor).stride[3])

    template <class Params>
    void set_gates(Params &s) const {
        s.cum = as<const float>(plan_.cum);
        s.reset = as<const uint8_t>(plan_.reset);
    }
    template <class Params>
    void set_gate_inputs(Params &s) const {
        s.flags = p_.flags & (CAKE_GDN_GATE | CAKE_GDN_BETA_SIGMOID | CAKE_GDN_NEG_EIGVAL);
        s.g = p_.g.data, s.g_dtype = p_.g.dtype;
        s.g_batch = p_.g.stride[0], s.g_token = p_.g.stride[1], s.g_head = p_.g.stride[2];
        s.beta = p_.beta.data, s.beta_dtype = p_.beta.dtype;
        s.beta_batch = p_.beta.stride[0], s.beta_token = p_.beta.stride[1], s.beta_head = p_.beta.stride[2];
        s.A_log = p_.A_log.data, s.A_log_dtype = p_.A_log.dtype, s.A_log_stride = p_.A_log.stride[0];
        s.dt_bias = p_.dt_bias.data, s.dt_bias_dtype = p_.dt_bias.dtype, s.dt_bias_stride = p_.dt_bias.stride[0];
    }
    template <class Params>
    void set_segments(Params &s) const {
        s.max_segments = plan_.scan_segments;
        s.segments = as<const cake_gdn_segment>(plan_.segments);
        s.sequence_segment = as<const int64_t>(plan_.sequence_segment);
        s.seams = as<float>(plan_.seam_states);
    }
    template <class Params>
    void set_prescan(Params &s) const {
        set_segments(s);
        s.bound = as<const float>(plan_.bound);
        s.transitions = at(plan_.transitions), s.forgotten = as<uint8_t>(plan_.forgotten);
    }
    // The saved states, or this slice's own.
    template <class Params>
    void set_states(Params &s) const {
        const bool saved = p_.h.data != nullptr;
        s.h = saved ? p_.h.data : at(plan_.h);
        s.h_heads = saved ? p_.HV : scan_heads_;
        s.h_begin = saved ? 0 : scan_begin_;
    }

    const cake_gdn_problem &p_;
    const plan::GpuPlan &plan_;
    char *const workspace_;
    void *const stream_;
    int64_t scan_begin_ = 0, scan_heads_ = 0;  // the scans' slice of value heads
    int64_t head_begin_ = 0, heads_ = 0;       // the running programs' slice, inside it
};

}  // namespace cake_gdn::cuda
