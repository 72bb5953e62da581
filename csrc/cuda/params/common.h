/* What the params of several GPU programs have in common, and the tables, which all of them read (stages.h). */
#ifndef CAKE_GDN_PARAMS_COMMON_H
#define CAKE_GDN_PARAMS_COMMON_H

#include "cake_gdn_det/cake_gdn_det.h"

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

#endif
