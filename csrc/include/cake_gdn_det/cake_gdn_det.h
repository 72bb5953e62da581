/* cake_gdn_det: chunked Gated DeltaNet training, forward and gradients, deterministic to the bit.
 *
 * The C interface of libcake_gdn_det. It needs neither torch nor a CUDA toolkit: device pointers and streams are
 * `void *`. One struct describes a call in both directions; three functions take it:
 *
 *     cake_gdn_problem p = {.struct_size = sizeof p, ...};
 *     cake_gdn_workspace_size(&p, CAKE_GDN_FORWARD, &bytes);
 *     cake_gdn_forward(&p, workspace, bytes, NULL);
 *
 * Per value head hv, with key head h = hv / (HV / H), state S [K, V], log decay g_t and step size beta_t:
 *
 *     S <- exp(g_t) S;   r_t = beta_t (v_t - S^T k_t);   S <- S + k_t r_t^T;   o_t = scale * S^T q_t
 *
 * (Gated DeltaNet, arXiv:2412.06464, equation 10, with scale and value-head groups.)
 *
 * The library allocates nothing on a device, keeps no state between calls except the thread-local error message, and
 * lets no exception cross this interface. Every function that can fail returns a cake_gdn_status. */
#ifndef CAKE_GDN_DET_H
#define CAKE_GDN_DET_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define CAKE_GDN_API __attribute__((visibility("default")))
#else
#define CAKE_GDN_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Raised by one whenever a struct or a function of this header changes incompatibly. */
#define CAKE_GDN_ABI_VERSION 1

/* Tokens of one chunk: the internal tile of every backend. */
#define CAKE_GDN_CHUNK 64

typedef enum cake_gdn_status {
    CAKE_GDN_OK = 0,
    CAKE_GDN_INVALID_ARGUMENT = 1,    /* a pointer, size, stride, dtype or offset that no backend accepts */
    CAKE_GDN_UNSUPPORTED = 2,         /* a valid problem that this build or this device cannot run */
    CAKE_GDN_WORKSPACE_TOO_SMALL = 3, /* fewer bytes than cake_gdn_workspace_size says */
    CAKE_GDN_OUT_OF_MEMORY = 4,       /* host memory */
    CAKE_GDN_DEVICE_ERROR = 5,        /* a CUDA call failed */
    CAKE_GDN_INTERNAL_ERROR = 6       /* a fault of this library */
} cake_gdn_status;

typedef enum cake_gdn_dtype {
    CAKE_GDN_BF16 = 0,
    CAKE_GDN_FP16 = 1,
    CAKE_GDN_FP32 = 2,
    CAKE_GDN_FP64 = 3,
    CAKE_GDN_INT32 = 4,
    CAKE_GDN_INT64 = 5
} cake_gdn_dtype;

typedef enum cake_gdn_backend { CAKE_GDN_CPU = 0, CAKE_GDN_CUDA = 1 } cake_gdn_backend;

typedef enum cake_gdn_direction { CAKE_GDN_FORWARD = 0, CAKE_GDN_BACKWARD = 1 } cake_gdn_direction;

/* Options, or-ed into cake_gdn_problem.flags. */
enum {
    CAKE_GDN_QK_L2NORM = 1 << 0,      /* q and k are normalised: x * rsqrt(sum(x^2) + 1e-6) */
    CAKE_GDN_GATE = 1 << 1,           /* the log decay is -exp(A_log) * softplus(g + dt_bias) */
    CAKE_GDN_BETA_SIGMOID = 1 << 2,   /* the step size is sigmoid(beta) */
    CAKE_GDN_NEG_EIGVAL = 1 << 3,     /* ... times 2; needs CAKE_GDN_BETA_SIGMOID */
    CAKE_GDN_STATE_V_FIRST = 1 << 4,  /* states given and returned are [V, K] instead of [K, V] */
    CAKE_GDN_BATCH_INVARIANT = 1 << 5 /* a sequence's bits depend on that sequence alone (always so on the CPU) */
};

/* A strided view. `data` NULL means absent. `stride` is in elements, one for each dimension that the field's comment
 * lists, any sign or order for inputs; two indices of one output must not meet. */
typedef struct cake_gdn_tensor {
    void *data;
    int32_t dtype; /* cake_gdn_dtype */
    int32_t reserved;
    int64_t stride[4];
} cake_gdn_tensor;

/* One call. Zero-initialise it, set struct_size, then what the call needs. */
typedef struct cake_gdn_problem {
    size_t struct_size;  /* sizeof(cake_gdn_problem) of the caller's header */
    int32_t backend;     /* cake_gdn_backend: where every pointer below lives */
    int32_t device;      /* CUDA device index */
    int32_t num_threads; /* host threads the CPU engine may use, at least 1; the bits do not depend on it */
    uint32_t flags;      /* CAKE_GDN_QK_L2NORM | ... */
    double scale;        /* of the output; K^-0.5 is usual */

    int64_t B, T;  /* batch and tokens; B = 1 when packed; T may be 0 */
    int64_t H, HV; /* key heads, value heads; HV a positive multiple of H */
    int64_t K, V;  /* head sizes */
    int64_t N;     /* sequences: B, or the number of packed ones */
    int64_t slots; /* rows of `h`: cake_gdn_state_slots(B, T); 0 without h */

    /* Pins choices that the GPU's planner would take from shapes and the device, as "key=value,key=value". "segment=32"
     * cuts sequences into segments of 32 chunks for the scans, "segment=whole" does not cut them, as fp16 inputs are not by
     * themselves (cut, they can overflow where gates grow or beta |k|^2 exceeds 2); "tail=fused" ends the backward with
     * one program, which groups of up to 8 value heads have, "tail=separate" with three. NULL: the planner chooses. Give
     * both directions of a call the same. Must be NULL on a CPU, which has no such choice. */
    const char *plan;

    /* Inputs of both directions. q, k, v share one floating dtype; g, beta and the others have any floating dtype. */
    cake_gdn_tensor q, k;          /* [B, T, H, K] */
    cake_gdn_tensor v;             /* [B, T, HV, V] */
    cake_gdn_tensor g, beta;       /* [B, T, HV] */
    cake_gdn_tensor A_log;         /* [HV], with CAKE_GDN_GATE */
    cake_gdn_tensor dt_bias;       /* [HV], optional with CAKE_GDN_GATE */
    cake_gdn_tensor initial_state; /* [N, HV, K, V] ([N, HV, V, K] with STATE_V_FIRST), optional: zeros */
    cake_gdn_tensor cu_seqlens;    /* [N + 1], contiguous int32 or int64, optional: dense. From 0 up to T, never down */
    cake_gdn_tensor cu_seqlens_host; /* the same on the host; needed only to check offsets that live on a device */

    /* Outputs of the forward. */
    cake_gdn_tensor o;           /* [B, T, HV, V], dtype of q */
    cake_gdn_tensor final_state; /* like initial_state, fp32 (fp64 for fp64 inputs), optional */

    /* Chunk-start states of all chunks but the first of each sequence: [slots, HV, K, W], contiguous, W =
     * cake_gdn_state_width(backend, V), dtype cake_gdn_state_dtype(backend, q.dtype). The chunk that starts at token t of the batch row b is slot
     * b * ((T - 1) / 64) + t / 64 - 1; slots that no chunk owns are zero. Optional: given to the forward it is
     * written, given to the backward it is read; without it the backward recomputes the states, to the same bits. */
    cake_gdn_tensor h;
    /* Saved and read like h, on a GPU only (the CPU leaves it alone): the chunks' inverses, [B, T, HV, 64], contiguous,
     * dtype of q. Goes with h. */
    cake_gdn_tensor A;

    /* Inputs of the backward: gradients of the outputs. Absent means zero. */
    cake_gdn_tensor d_o; /* like o */
    cake_gdn_tensor dht; /* like final_state */

    /* Outputs of the backward, each optional: what is absent is not written. None may overlap an input or another output:
     * on a GPU dq, dk and dv hold intermediates until they are written. */
    cake_gdn_tensor dq, dk;           /* like q, k; dtype of q */
    cake_gdn_tensor dv;               /* like v; dtype of q */
    cake_gdn_tensor dg, dbeta;        /* [B, T, HV], any floating dtype */
    cake_gdn_tensor dA_log, ddt_bias; /* [HV], any floating dtype, with CAKE_GDN_GATE */
    cake_gdn_tensor dh0;              /* like final_state */
} cake_gdn_problem;

/* CAKE_GDN_ABI_VERSION of the library, to be compared with the header's. */
CAKE_GDN_API int cake_gdn_abi_version(void);

/* Why the last call of this thread failed: never NULL, empty after a success, valid until the thread's next call. */
CAKE_GDN_API const char *cake_gdn_last_error(void);

/* How the library was built, as a JSON object: version, compiler, CUDA toolkit, architectures, programs, CPU units. */
CAKE_GDN_API const char *cake_gdn_build_info(void);

/* Rows of `h` for batch B (1 when packed) and T tokens: B * (max(T - 1, 0) / 64). */
CAKE_GDN_API int64_t cake_gdn_state_slots(int64_t B, int64_t T);

/* Element type of `h`, a cake_gdn_dtype, for inputs of `dtype` on `backend`. */
CAKE_GDN_API int cake_gdn_state_dtype(int backend, int dtype);

/* Elements of a row of `h`: V, or what the backend rounds it up to. */
CAKE_GDN_API int64_t cake_gdn_state_width(int backend, int64_t V);

/* Scratch bytes that the call needs; on a GPU they must start at a multiple of 256. A function of shapes, dtypes, options and the
 * device; reads no tensor. */
CAKE_GDN_API cake_gdn_status cake_gdn_workspace_size(const cake_gdn_problem *problem, cake_gdn_direction direction,
                                                     size_t *bytes);

/* Runs one direction. `workspace` is scratch of at least cake_gdn_workspace_size bytes where the backend's tensors
 * live; `stream` is a cudaStream_t, ignored by the CPU engine, which returns when the outputs are written. */
CAKE_GDN_API cake_gdn_status cake_gdn_forward(const cake_gdn_problem *problem, void *workspace, size_t workspace_bytes,
                                              void *stream);
CAKE_GDN_API cake_gdn_status cake_gdn_backward(const cake_gdn_problem *problem, void *workspace, size_t workspace_bytes,
                                               void *stream);

#ifdef __cplusplus
}
#endif
#endif /* CAKE_GDN_DET_H */
