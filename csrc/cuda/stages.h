/* The run functions of the GPU programs: one flat params struct and one function a stage. Internal (the public
 * interface is cake_gdn_det.h), plain C and free of the CUDA toolkit, so that the bindings and the tests can reach
 * every program alone.
 *
 * A struct's fields are listed once, in an X-macro X(type, name), from which the C struct and its Python class are
 * made. Pointers are device pointers unless a comment says otherwise; streams are cudaStream_t. Every run function is
 * asynchronous on the stream, allocates nothing, may be captured in a CUDA graph, leaves the current device as it was,
 * and on failure returns a status with the reason in cake_gdn_last_error(). */
#ifndef CAKE_GDN_STAGES_H
#define CAKE_GDN_STAGES_H

#include "cake_gdn_det/cake_gdn_det.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CAKE_GDN_PARAMS_FIELD(type, name) type name;

/* ---- tables: cu_seqlens -> chunk and segment tables ---------------------------------------------------------------
 * Tokens are rows of the flattened [B * T] batch. Sequence n covers the tokens [offsets[n], offsets[n + 1]), its
 * chunks are the 64-token tiles that start at its first token (the last one may be shorter), its segments are runs of
 * `segment_chunks` of its chunks. An empty sequence has no chunk and one segment of zero chunks, so that whoever
 * handles a sequence's first and last segment also passes its state through. */

typedef struct cake_gdn_chunk {
    int64_t token;    /* its first token */
    int32_t sequence; /* -1 past the last chunk */
    int32_t length;   /* 1 to 64 tokens; 0 past the last chunk */
} cake_gdn_chunk;

typedef struct cake_gdn_segment {
    int64_t chunk;    /* its first chunk, an index into the chunk table */
    int32_t sequence; /* -1 past the last segment */
    int32_t chunks;   /* 0 for an empty sequence and past the last segment */
} cake_gdn_segment;

/* Offsets on the device cannot be checked by the host, so none is trusted: offset n is replaced by the largest of the
 * offsets 0..n, each clamped to [0, T]. Right offsets are unchanged; wrong ones give disjoint sequences inside the
 * tensors. Tokens outside [offsets[0], offsets[N]) belong to no sequence.
 *
 * All `max_chunks` and `max_segments` entries are written. B * T and N are at most 2^62 and 2^31 - 2. */
#define CAKE_GDN_TABLES_PARAMS(X)                                                                              \
    X(const void *, cu_seqlens)  /* [N + 1], or NULL: dense, sequence n is the batch row n of N = B */         \
    X(int32_t, cu_seqlens_dtype) /* CAKE_GDN_INT32 or CAKE_GDN_INT64; not read when dense */                   \
    X(int32_t, device)           /* CUDA device index */                                                       \
    X(int64_t, B)                /* 1 when packed */                                                           \
    X(int64_t, T)                                                                                              \
    X(int64_t, N)                                                                                              \
    X(int64_t, segment_chunks)      /* chunks of a full segment, at least 1 */                                 \
    X(int64_t, max_chunks)          /* entries of `chunks`: at least cake_gdn_tables_max_chunks(B * T, N) */   \
    X(int64_t, max_segments)        /* entries of `segments`: at least cake_gdn_tables_max_segments(...) */    \
    X(int64_t *, offsets)           /* out [N + 1]: first token of each sequence, then the end of the last */  \
    X(int64_t *, sequence_chunk)    /* out [N + 1]: first chunk of each sequence, then the number of chunks */ \
    X(int64_t *, sequence_segment)  /* out [N + 1]: first segment of each sequence, then the number of them */ \
    X(cake_gdn_chunk *, chunks)     /* out [max_chunks], 16-byte aligned */                                    \
    X(cake_gdn_segment *, segments) /* out [max_segments], 16-byte aligned */

/* ---- the chain --------------------------------------------------------------------------------------------------
 * Every program of the chain works on the chunk table and on one slice of the value heads: the `heads` heads from
 * `head_begin` on. Per-token scalars are [HV, B * T]; intermediates of a slice are [B * T, heads, W] with W = K or V
 * rounded up to 8 elements (CAKE_GDN_WIDTH), columns past K or V zero. User tensors keep their strides.
 *
 * The backward's programs after the scans may run over slices of the scans' slice: what the scans left (v_new, du, dh)
 * holds the `stored_heads` heads from `stored_begin` on. For every other program the two slices are the same. */

#define CAKE_GDN_WIDTH(columns) (((columns) + 7) / 8 * 8) /* elements of a padded row: 16 bytes */

#define CAKE_GDN_CHAIN(X)                                                                               \
    X(int32_t, device)                                                                                  \
    X(int32_t, dtype) /* of q, k, v and of every 16-bit intermediate: CAKE_GDN_BF16 or CAKE_GDN_FP16 */ \
    X(int64_t, B)                                                                                       \
    X(int64_t, T)                                                                                       \
    X(int64_t, N)                                                                                       \
    X(int64_t, H)                                                                                       \
    X(int64_t, HV)                                                                                      \
    X(int64_t, K)                                                                                       \
    X(int64_t, V)                                                                                       \
    X(int64_t, head_begin)                                                                              \
    X(int64_t, heads)                                                                                   \
    X(int64_t, stored_begin)                                                                            \
    X(int64_t, stored_heads)                                                                            \
    X(int64_t, max_chunks)                                                                              \
    X(const cake_gdn_chunk *, chunks)  /* [max_chunks], from tables */                                  \
    X(const int64_t *, sequence_chunk) /* [N + 1], from tables */

/* Rows of a [B, T, heads, columns] tensor: unit last stride, rows 16-byte aligned; strides in elements. */
#define CAKE_GDN_ROWS(X, name) X(void *, name) X(int64_t, name##_batch) X(int64_t, name##_token) X(int64_t, name##_head)

/* A user's state [N, HV, K, V], any floating dtype, any strides (in elements; swap k and v for [N, HV, V, K]); NULL: zeros. */
#define CAKE_GDN_STATE(X, name) \
    X(void *, name)             \
    X(int32_t, name##_dtype)    \
    X(int64_t, name##_sequence) \
    X(int64_t, name##_head)     \
    X(int64_t, name##_k)        \
    X(int64_t, name##_v)

/* The scans cut sequences into segments. A seam is the border of two segments of one sequence; the one before segment s
 * (an index into the table) of sequence n is seam s - n - 1, so that all seams of a call count from 0. */
#define CAKE_GDN_SEGMENTS(X)                                                                             \
    CAKE_GDN_CHAIN(X)                                                                                    \
    X(int64_t, max_segments)              /* entries to look at: every segment, and maybe unused ones */ \
    X(const cake_gdn_segment *, segments) /* [max_segments], from tables */                              \
    X(const int64_t *, sequence_segment)  /* [N + 1], from tables */

/* Of a pre-scan. A transition is stored transposed, in two bf16 parts whose sum it is; left out, it is undefined. */
#define CAKE_GDN_PRESCAN(X)                                                    \
    CAKE_GDN_SEGMENTS(X)                                                       \
    X(const float *, bound) /* [heads, max_chunks], from wy or wy_recompute */ \
    X(float *, seams)       /* out [seams, heads, V, W of K] */                \
    X(void *, transitions)  /* out [seams, heads, 2, K, W of K] */             \
    X(uint8_t *, forgotten) /* out [seams, heads]: 1: the transition is left out */

#define CAKE_GDN_GATES(X)                                                                          \
    X(const float *, cum)     /* [HV, B * T] in-chunk cumulative log decay since the last reset */ \
    X(const uint8_t *, reset) /* [HV, B * T] last reset at or before the token, index in the chunk plus one; 0: none */

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

/* The gate's and the step size's inputs, and what is done to them. */
#define CAKE_GDN_GATE_INPUTS(X)                                                        \
    X(uint32_t, flags) /* CAKE_GDN_GATE, CAKE_GDN_BETA_SIGMOID, CAKE_GDN_NEG_EIGVAL */ \
    X(const void *, g) /* [B, T, HV] */                                                \
    X(int32_t, g_dtype)                                                                \
    X(int64_t, g_batch)                                                                \
    X(int64_t, g_token)                                                                \
    X(int64_t, g_head)                                                                 \
    X(const void *, beta) /* [B, T, HV] */                                             \
    X(int32_t, beta_dtype)                                                             \
    X(int64_t, beta_batch)                                                             \
    X(int64_t, beta_token)                                                             \
    X(int64_t, beta_head)                                                              \
    X(const void *, A_log) /* [HV], with CAKE_GDN_GATE */                              \
    X(int32_t, A_log_dtype)                                                            \
    X(int64_t, A_log_stride)                                                           \
    X(const void *, dt_bias) /* [HV], optional */                                      \
    X(int32_t, dt_bias_dtype)                                                          \
    X(int64_t, dt_bias_stride)

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

/* Every stage: F(name, NAME, name of its Python class). */
#define CAKE_GDN_STAGES(F)                                      \
    F(tables, TABLES, "TablesParams")                           \
    F(pack, PACK, "PackParams")                                 \
    F(prep, PREP, "PrepParams")                                 \
    F(wy, WY, "WyParams")                                       \
    F(wy_recompute, WY_RECOMPUTE, "WyRecomputeParams")          \
    F(fwd_prescan, FWD_PRESCAN, "FwdPrescanParams")             \
    F(stitch, STITCH, "StitchParams")                           \
    F(fwd_scan, FWD_SCAN, "FwdScanParams")                      \
    F(output, OUTPUT, "OutputParams")                           \
    F(dv_local, DV_LOCAL, "DvLocalParams")                      \
    F(adjoint_prescan, ADJOINT_PRESCAN, "AdjointPrescanParams") \
    F(adjoint_scan, ADJOINT_SCAN, "AdjointScanParams")          \
    F(dqkwg, DQKWG, "DqkwgParams")                              \
    F(wy_backward, WY_BACKWARD, "WyBackwardParams")             \
    F(finalize, FINALIZE, "FinalizeParams")                     \
    F(tail, TAIL, "TailParams")                                 \
    F(gate_backward, GATE_BACKWARD, "GateBackwardParams")       \
    F(gate_reduce, GATE_REDUCE, "GateReduceParams")

#define CAKE_GDN_DECLARE_STAGE(name, NAME, Class)       \
    typedef struct cake_gdn_##name##_params {           \
        CAKE_GDN_##NAME##_PARAMS(CAKE_GDN_PARAMS_FIELD) \
    } cake_gdn_##name##_params;                         \
    CAKE_GDN_API cake_gdn_status cake_gdn_run_##name(const cake_gdn_##name##_params *params, void *stream);
CAKE_GDN_STAGES(CAKE_GDN_DECLARE_STAGE)

#ifdef __cplusplus
}
#endif
#endif /* CAKE_GDN_STAGES_H */
