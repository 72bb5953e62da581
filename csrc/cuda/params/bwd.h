/* Params of the backward's programs (stages.h). */
#ifndef CAKE_GDN_PARAMS_BWD_H
#define CAKE_GDN_PARAMS_BWD_H

#include "cuda/params/common.h"

/* wy_recompute: w and v_new = u - w h from the saved A and h, for the backward: the forward's bits. */
#define CAKE_GDN_WY_RECOMPUTE_PARAMS(X)                                                              \
    CAKE_GDN_CHAIN(X)                                                                                \
    CAKE_GDN_ROWS(X, k)                                                                              \
    CAKE_GDN_ROWS(X, v)                                                                              \
    CAKE_GDN_GATES(X)                                                                                \
    CAKE_GDN_STATE(X, initial_state)                                                                 \
    X(const float *, step) /* [HV, B * T] */                                                         \
    X(const void *, A)     /* [B * T, HV, 64] */                                                     \
    X(const void *, h)     /* [slots, HV, K, W of V]; NULL: v_new gets u, the scan will finish it */ \
    X(void *, w)           /* out slice [.., K] */                                                   \
    X(void *, v_new)       /* out slice [.., V] */                                                   \
    X(float *, bound)      /* out [heads, max_chunks], wy's bits; NULL: unwanted */

/* dv_local: scale tril(q k^T G)^T do. */
#define CAKE_GDN_DV_LOCAL_PARAMS(X) \
    CAKE_GDN_CHAIN(X)               \
    X(float, scale)                 \
    CAKE_GDN_ROWS(X, q)             \
    CAKE_GDN_ROWS(X, k)             \
    CAKE_GDN_ROWS(X, d_o)           \
    CAKE_GDN_GATES(X)               \
    X(void *, dv) /* out slice [.., V] */

/* adjoint_prescan: of every segment but its sequence's first one the gradient dS of the state before it for a zero
 * gradient of the state after it, and M^T: the gradient before it is dS + M^T (that after it). */
#define CAKE_GDN_ADJOINT_PRESCAN_PARAMS(X) \
    CAKE_GDN_PRESCAN(X)                    \
    X(float, scale)                        \
    CAKE_GDN_ROWS(X, q)                    \
    CAKE_GDN_ROWS(X, k)                    \
    CAKE_GDN_ROWS(X, d_o)                  \
    CAKE_GDN_GATES(X)                      \
    X(const void *, w)  /* slice */        \
    X(const void *, dv) /* slice: dv_local */

/* adjoint_scan: against the order of the chunks, dh the gradient of the state after the chunk:
 * du = dv_local + d (k dh);  dh <- e_last dh + scale q^T (e do) - w^T du. */
#define CAKE_GDN_ADJOINT_SCAN_PARAMS(X)                                                                             \
    CAKE_GDN_SEGMENTS(X)                                                                                            \
    X(const float *, seams) /* [seams, heads, V, W of K] gradient of the state at each seam; NULL: there is none */ \
    X(float, scale)                                                                                                 \
    CAKE_GDN_ROWS(X, q)                                                                                             \
    CAKE_GDN_ROWS(X, k)                                                                                             \
    CAKE_GDN_ROWS(X, d_o)                                                                                           \
    CAKE_GDN_GATES(X)                                                                                               \
    CAKE_GDN_STATE(X, dht)                                                                                          \
    CAKE_GDN_STATE(X, dh0) /* out fp32; NULL: not wanted */                                                         \
    X(const void *, w)     /* slice */                                                                              \
    X(void *, dv)          /* slice, in: dv_local, out: du */                                                       \
    X(void *, dh)          /* out [slots, heads, K, W of V]: slot s holds the gradient of the state in h's slot s */

/* dqkwg: what reaches q and k through the output and the state, dw, and their share of the gate's gradient. */
#define CAKE_GDN_DQKWG_PARAMS(X)                               \
    CAKE_GDN_CHAIN(X)                                          \
    X(float, scale)                                            \
    CAKE_GDN_ROWS(X, q)                                        \
    CAKE_GDN_ROWS(X, k)                                        \
    CAKE_GDN_ROWS(X, d_o)                                      \
    CAKE_GDN_GATES(X)                                          \
    CAKE_GDN_STATE(X, initial_state)                           \
    CAKE_GDN_STATE(X, dht)                                     \
    X(const void *, v_new) /* stored slice */                  \
    X(const void *, du)    /* stored slice */                  \
    X(const void *, h)                                         \
    X(int64_t, h_heads)                                        \
    X(int64_t, h_begin)                                        \
    X(const void *, dh) /* [slots, stored_heads, K, W of V] */ \
    X(void *, dq)       /* out slice [.., K] */                \
    X(void *, dk)       /* out slice [.., K] */                \
    X(void *, dw)       /* out slice [.., K] */                \
    X(float *, dcum)    /* out [HV, B * T]: gradient of cum, its share */

/* wy_backward: through w = A (beta e k), u = A (beta v) and A. */
#define CAKE_GDN_WY_BACKWARD_PARAMS(X)                                                   \
    CAKE_GDN_CHAIN(X)                                                                    \
    CAKE_GDN_ROWS(X, k)                                                                  \
    CAKE_GDN_ROWS(X, v)                                                                  \
    CAKE_GDN_GATES(X)                                                                    \
    X(const float *, step) /* [HV, B * T] */                                             \
    X(const void *, A)     /* [B * T, HV, 64] */                                         \
    X(const void *, v_new) /* stored slice */                                            \
    X(const void *, dw)    /* slice */                                                   \
    X(const void *, du)    /* stored slice */                                            \
    X(void *, dk)          /* slice, in: dqkwg's part, out: the value head's whole dk */ \
    X(void *, dv)          /* out [B, T, HV, V]; NULL: not wanted */                     \
    X(int64_t, dv_batch)                                                                 \
    X(int64_t, dv_token)                                                                 \
    X(int64_t, dv_head)                                                                  \
    X(int64_t, dv_column)                                                                \
    X(float *, dstep) /* out [HV, B * T]: gradient of the step size */                   \
    X(float *, dcum)  /* in: dqkwg's share, out: the sum */

/* finalize: dq or dk of one key head: the sum over its value heads in head order, through the normalisation. */
#define CAKE_GDN_FINALIZE_PARAMS(X)                                                                                    \
    X(int32_t, device)                                                                                                 \
    X(int32_t, dtype)                                                                                                  \
    X(int64_t, B)                                                                                                      \
    X(int64_t, T)                                                                                                      \
    X(int64_t, H)     /* key heads of this slice */                                                                    \
    X(int64_t, group) /* value heads of a key head */                                                                  \
    X(int64_t, K)                                                                                                      \
    X(const void *, parts) /* [B * T, H * group, W] */                                                                 \
    X(const void *, x)     /* [B * T, x_heads, W] pack's rows, from the slice's first head on; NULL: not normalised */ \
    X(int64_t, x_heads)    /* key heads in all */                                                                      \
    X(const float *, rstd) /* [B * T, x_heads], from the slice's first head on; with x */                              \
    X(void *, dx)          /* out [B, T, H, K] */                                                                      \
    X(int64_t, dx_batch)                                                                                               \
    X(int64_t, dx_token)                                                                                               \
    X(int64_t, dx_head)                                                                                                \
    X(int64_t, dx_column)

/* tail: dqkwg, wy_backward and finalize in one, for slices of whole groups of at most CAKE_GDN_TAIL_GROUP value heads:
 * the parts of dq and dk meet on the chip, and no dw is needed. */
#define CAKE_GDN_TAIL_GROUP 8
#define CAKE_GDN_TAIL_PARAMS(X)                                                                               \
    CAKE_GDN_CHAIN(X)                                                                                         \
    X(float, scale)                                                                                           \
    CAKE_GDN_ROWS(X, q)                                                                                       \
    CAKE_GDN_ROWS(X, k)                                                                                       \
    CAKE_GDN_ROWS(X, v)                                                                                       \
    CAKE_GDN_ROWS(X, d_o)                                                                                     \
    CAKE_GDN_GATES(X)                                                                                         \
    CAKE_GDN_STATE(X, initial_state)                                                                          \
    CAKE_GDN_STATE(X, dht)                                                                                    \
    X(const float *, step) /* [HV, B * T] */                                                                  \
    X(const void *, A)     /* [B * T, HV, 64] */                                                              \
    X(const void *, v_new) /* stored slice */                                                                 \
    X(const void *, du)    /* stored slice */                                                                 \
    X(const void *, h)                                                                                        \
    X(int64_t, h_heads)                                                                                       \
    X(int64_t, h_begin)                                                                                       \
    X(const void *, dh)      /* [slots, stored_heads, K, W of V] */                                           \
    X(const float *, q_rstd) /* [B * T, H], when q holds rows that pack normalised; NULL: no normalisation */ \
    X(const float *, k_rstd) /* [B * T, H], as q_rstd */                                                      \
    X(void *, dq)            /* out [B, T, H, K]; NULL: not wanted */                                         \
    X(int64_t, dq_batch)                                                                                      \
    X(int64_t, dq_token)                                                                                      \
    X(int64_t, dq_head)                                                                                       \
    X(int64_t, dq_column)                                                                                     \
    X(void *, dk) /* out [B, T, H, K]; NULL: not wanted */                                                    \
    X(int64_t, dk_batch)                                                                                      \
    X(int64_t, dk_token)                                                                                      \
    X(int64_t, dk_head)                                                                                       \
    X(int64_t, dk_column)                                                                                     \
    X(void *, dv) /* out [B, T, HV, V]; NULL: not wanted */                                                   \
    X(int64_t, dv_batch)                                                                                      \
    X(int64_t, dv_token)                                                                                      \
    X(int64_t, dv_head)                                                                                       \
    X(int64_t, dv_column)                                                                                     \
    X(float *, dstep) /* out [HV, B * T]: gradient of the step size */                                        \
    X(float *, dcum)  /* out [HV, B * T]: gradient of cum */

/* gate_backward: dg from dcum by the reverse cumulative sum within the chunk, never across a reset, and the pullbacks of
 * the in-kernel gate and sigmoid; each chunk's sums for dA_log and ddt_bias. */
#define CAKE_GDN_GATE_BACKWARD_PARAMS(X)                                \
    CAKE_GDN_CHAIN(X)                                                   \
    CAKE_GDN_GATE_INPUTS(X)                                             \
    CAKE_GDN_GATES(X)                                                   \
    X(const float *, dcum)  /* [HV, B * T] */                           \
    X(const float *, dstep) /* [HV, B * T] gradient of the step size */ \
    X(void *, dg)           /* out [B, T, HV]; NULL: not wanted */      \
    X(int32_t, dg_dtype)                                                \
    X(int64_t, dg_batch)                                                \
    X(int64_t, dg_token)                                                \
    X(int64_t, dg_head)                                                 \
    X(void *, dbeta) /* out [B, T, HV]; NULL: not wanted */             \
    X(int32_t, dbeta_dtype)                                             \
    X(int64_t, dbeta_batch)                                             \
    X(int64_t, dbeta_token)                                             \
    X(int64_t, dbeta_head)                                              \
    X(float *, partials) /* out [max_chunks, HV, 2]: of dA_log and ddt_bias; NULL: not wanted */

/* gate_reduce: dA_log and ddt_bias, the sum of the chunks' shares in a fixed order. */
#define CAKE_GDN_GATE_REDUCE_PARAMS(X)                          \
    CAKE_GDN_CHAIN(X)                                           \
    X(const float *, partials) /* [max_chunks, HV, 2] */        \
    X(void *, dA_log)          /* out [HV]; NULL: not wanted */ \
    X(int32_t, dA_log_dtype)                                    \
    X(int64_t, dA_log_stride)                                   \
    X(void *, ddt_bias) /* out [HV]; NULL: not wanted */        \
    X(int32_t, ddt_bias_dtype)                                  \
    X(int64_t, ddt_bias_stride)

#endif
