/* Params of the forward's programs (stages.h). */
#ifndef CAKE_GDN_PARAMS_FWD_H
#define CAKE_GDN_PARAMS_FWD_H

#include "cuda/params/common.h"

/* pack: rows of any stride -> contiguous [B * T, heads, W], normalised on the way when asked for. */
#define CAKE_GDN_PACK_PARAMS(X)                            \
    X(int32_t, device)                                     \
    X(int32_t, dtype)                                      \
    X(int32_t, normalise) /* x * rsqrt(sum(x^2) + 1e-6) */ \
    X(int64_t, B)                                          \
    X(int64_t, T)                                          \
    X(int64_t, heads)                                      \
    X(int64_t, columns)                                    \
    X(const void *, x) /* [B, T, heads, columns] */        \
    X(int64_t, x_batch)                                    \
    X(int64_t, x_token)                                    \
    X(int64_t, x_head)                                     \
    X(int64_t, x_column)                                   \
    X(void *, out)   /* [B * T, heads, W] */               \
    X(float *, rstd) /* [B * T, heads], with normalise; may be NULL */

/* prep: cumulative gates and step sizes of all value heads. */
#define CAKE_GDN_PREP_PARAMS(X)               \
    CAKE_GDN_CHAIN(X)                         \
    CAKE_GDN_GATE_INPUTS(X)                   \
    X(float *, cum)     /* out [HV, B * T] */ \
    X(uint8_t *, reset) /* out [HV, B * T] */ \
    X(float *, step)    /* out [HV, B * T]: the step size beta after the sigmoid, fp32 */

/* wy: A = (I + tril(beta_i G_ij k_i.k_j, -1))^-1, w = A (beta e k), u = A (beta v). */
#define CAKE_GDN_WY_PARAMS(X)                                                                            \
    CAKE_GDN_CHAIN(X)                                                                                    \
    CAKE_GDN_ROWS(X, k)                                                                                  \
    CAKE_GDN_ROWS(X, v)                                                                                  \
    CAKE_GDN_GATES(X)                                                                                    \
    X(const float *, step) /* [HV, B * T] */                                                             \
    X(void *, A)           /* out [B * T, HV, 64]: rows of the inverses, global heads; NULL: unwanted */ \
    X(void *, w)           /* out slice [.., K] */                                                       \
    X(void *, u)           /* out slice [.., V] */                                                       \
    X(float *, bound)      /* out [heads, max_chunks]: log of the most that a chunk keeps of a state; NULL: unwanted */

/* fwd_prescan: of every segment but a sequence's last, the state S after it from a zero state, and M: the state after it
 * is S + M (the state before it). Where that forgets (tile/segment.cuh), only the segment's end is scanned, without M. */
#define CAKE_GDN_FWD_PRESCAN_PARAMS(X) \
    CAKE_GDN_PRESCAN(X)                \
    CAKE_GDN_ROWS(X, k)                \
    CAKE_GDN_GATES(X)                  \
    X(const void *, w) /* slice */     \
    X(const void *, u) /* slice */

/* stitch: the state at each seam of a sequence, one after the other: S + M (the state at the seam before). `backward`
 * goes against the order of the seams, for gradients of the state. */
#define CAKE_GDN_STITCH_PARAMS(X)                                                                    \
    CAKE_GDN_SEGMENTS(X)                                                                             \
    X(int32_t, backward)                                                                             \
    CAKE_GDN_STATE(X, start)      /* initial_state, or dht */                                        \
    X(float *, seams)             /* [seams, heads, V, W of K], in: S, out: the state at the seam */ \
    X(const void *, transitions)  /* [seams, heads, 2, K, W of K] */                                 \
    X(const uint8_t *, forgotten) /* [seams, heads] */

/* fwd_scan: h_{c+1} = e_last h_c + k^T (d v_new), v_new = u - w h_c, in the order of the chunks. */
#define CAKE_GDN_FWD_SCAN_PARAMS(X)                                                                           \
    CAKE_GDN_SEGMENTS(X)                                                                                      \
    X(const float *, seams) /* [seams, heads, V, W of K] state at each seam; NULL: there is none */           \
    CAKE_GDN_ROWS(X, k)                                                                                       \
    CAKE_GDN_GATES(X)                                                                                         \
    CAKE_GDN_STATE(X, initial_state)                                                                          \
    CAKE_GDN_STATE(X, final_state) /* out fp32; NULL: not wanted */                                           \
    X(const void *, w)             /* slice */                                                                \
    X(void *, u)                   /* slice, in: u, out: v_new */                                             \
    X(void *, h)                   /* out [slots, h_heads, K, W of V]: states before non-first chunks */      \
    X(int64_t, h_heads)            /* HV and h_begin = head_begin for the saved tensor, or the slice's own */ \
    X(int64_t, h_begin)

/* output: o = scale (e q h + tril(q k^T G) v_new). */
#define CAKE_GDN_OUTPUT_PARAMS(X)        \
    CAKE_GDN_CHAIN(X)                    \
    X(float, scale)                      \
    CAKE_GDN_ROWS(X, q)                  \
    CAKE_GDN_ROWS(X, k)                  \
    CAKE_GDN_GATES(X)                    \
    CAKE_GDN_STATE(X, initial_state)     \
    X(const void *, v_new) /* slice */   \
    X(const void *, h)                   \
    X(int64_t, h_heads)                  \
    X(int64_t, h_begin)                  \
    X(void *, o) /* out [B, T, HV, V] */ \
    X(int64_t, o_batch)                  \
    X(int64_t, o_token)                  \
    X(int64_t, o_head)                   \
    X(int64_t, o_column)

#endif
