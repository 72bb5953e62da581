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

/* Entries of the chunk and the segment table that suffice for any offsets: functions of shapes only, reached by some
 * layout. `tokens` is B * T. Every non-empty sequence takes one chunk with its first token, and another one with each
 * further 64 tokens; every sequence takes one segment, and another one with each further 64 * segment_chunks tokens. */
static inline int64_t cake_gdn_tables_max_chunks(int64_t tokens, int64_t N) {
    const int64_t filled = N < tokens ? N : tokens;
    return filled + (tokens - filled) / CAKE_GDN_CHUNK;
}

static inline int64_t cake_gdn_tables_max_segments(int64_t tokens, int64_t N, int64_t segment_chunks) {
    return N + (tokens > 0 ? (tokens - 1) / CAKE_GDN_CHUNK / segment_chunks : 0);
}

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

typedef struct cake_gdn_tables_params {
    CAKE_GDN_TABLES_PARAMS(CAKE_GDN_PARAMS_FIELD)
} cake_gdn_tables_params;

CAKE_GDN_API cake_gdn_status cake_gdn_run_tables(const cake_gdn_tables_params *params, void *stream);

#ifdef __cplusplus
}
#endif
#endif /* CAKE_GDN_STAGES_H */
