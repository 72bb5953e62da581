// What every program needs to know of its chunk: where it is, its gates, and the state it starts from.
#pragma once

#include "cuda/stages.h"
#include "cuda/tile/tile.cuh"

namespace cake_gdn::cuda {

constexpr int C = CAKE_GDN_CHUNK;
constexpr int kD = 128;  // K and V, padded with zeros in shared memory

// Rows of a [B, T, heads, columns] tensor with unit last stride and 16-byte-aligned rows; strides in elements.
struct Rows {
    void *data;
    int64_t batch, token, head;
};

// The kernel's views of a params struct's tensor groups (params/common.h: CAKE_GDN_ROWS, CAKE_GDN_STATE).
#define CAKE_GDN_ROWS_OF(p, name) \
    ::cake_gdn::cuda::Rows { (p).name, (p).name##_batch, (p).name##_token, (p).name##_head }
#define CAKE_GDN_STATE_OF(p, name)                                                                   \
    ::cake_gdn::cuda::StateView {                                                                    \
        (p).name, (p).name##_dtype, (p).name##_sequence, (p).name##_head, (p).name##_k, (p).name##_v \
    }

// One entry of the chunk table, placed in the tensors. `row` = b * T + t is the token's row of the flattened batch, which
// indexes the dense intermediates; `b` and `t` index strided inputs.
struct Chunk {
    int64_t row, b, t;
    int64_t slot;  // of the state before the chunk in h (undefined for a first chunk)
    int sequence;  // -1: no chunk, the block has nothing to do
    int length;
    bool first, last;  // of its sequence
};

template <class Params>
__device__ __forceinline__ Chunk chunk_at(const Params &p, int64_t index) {
    const cake_gdn_chunk entry = p.chunks[index];
    Chunk c;
    c.sequence = entry.sequence;
    c.length = entry.length;
    c.row = entry.token;
    c.b = p.B > 1 ? entry.token / p.T : 0;
    c.t = entry.token - c.b * p.T;
    c.slot = c.b * ((p.T - 1) / C) + c.t / C - 1;
    c.first = entry.sequence >= 0 && p.sequence_chunk[entry.sequence] == index;
    c.last = entry.sequence >= 0 && p.sequence_chunk[entry.sequence + 1] == index + 1;
    return c;
}

// Heads of this block: of the slice, of all value heads, and the key head that goes with it.
struct Heads {
    int local, value, key;
};

// Block index = chunk * heads + local head: the value heads of a chunk are neighbours and share q and k through L2.
template <class Params>
__device__ __forceinline__ Heads block_heads(const Params &p) {
    const uint32_t heads = static_cast<uint32_t>(p.heads),
                   group = static_cast<uint32_t>(p.HV) / static_cast<uint32_t>(p.H);
    const uint32_t local = blockIdx.x % heads, value = static_cast<uint32_t>(p.head_begin) + local;
    return {static_cast<int>(local), static_cast<int>(value), static_cast<int>(value / group)};
}
template <class Params>
__device__ __forceinline__ Chunk block_chunk(const Params &p) {
    return chunk_at(p, blockIdx.x / static_cast<uint32_t>(p.heads));
}

// Slot of the state after a chunk that is not the last of its sequence: the next chunk's.
__device__ __forceinline__ int64_t next_slot(const Chunk &c) { return c.slot + 1; }

template <class E>
__device__ __forceinline__ const E *rows_at(const Rows &rows, const Chunk &c, int64_t head) {
    return static_cast<const E *>(rows.data) + c.b * rows.batch + c.t * rows.token + head * rows.head;
}

// exp(x) to about 2 ulp, for x that are differences of sums of gates. Zero for -inf.
__device__ __forceinline__ float exp_of(float x) { return __expf(x); }

// Gates of a chunk and a value head in shared memory: cum, and the last reset at or before each token plus one.
// Entries from `length` on repeat the last token's, so that no exponent of garbage is formed.
struct Gates {
    float *cum;      // [C]
    uint8_t *reset;  // [C]; 0: none

    // G_ij: what token i keeps of token j's write. The exponential is formed in any case, whatever it is where the token is
    // not seen: a select, where a branch would cost more.
    __device__ __forceinline__ float decay(int i, int j) const {
        const float kept = exp_of(cum[i] - cum[j]);
        return j <= i && j + 1 >= reset[i] ? kept : 0.0f;
    }
    // e_i: what token i keeps of the state before the chunk.
    __device__ __forceinline__ float from_start(int i) const { return reset[i] == 0 ? exp_of(cum[i]) : 0.0f; }
    // d_j: what the state after the chunk keeps of token j's write.
    __device__ __forceinline__ float to_end(int j, int length) const {
        return j < length ? decay(length - 1, j) : 0.0f;
    }
};

// Threads 0..63 of the block fill them; the caller places the barrier. cum, reset: [HV, B * T], global head hv.
template <class Params>
__device__ __forceinline__ void load_gates(Gates gates, const Params &p, const Chunk &c, int64_t hv) {
    const int i = threadIdx.x;
    if (i < C) {
        const int64_t at = hv * (p.B * p.T) + c.row + min(i, c.length - 1);
        gates.cum[i] = p.cum[at];
        gates.reset[i] = p.reset[at];
    }
}

// Address of the chunk's first row in an intermediate [B * T, heads, width] of this slice of heads (local head `head`).
template <class E, class Params>
__device__ __forceinline__ E *slice_at(E *data, const Params &p, const Chunk &c, int64_t head, int64_t width) {
    return data + (c.row * p.heads + head) * width;
}

// The same for what the scans stored, by global head.
template <class E, class Params>
__device__ __forceinline__ E *stored_at(E *data, const Params &p, const Chunk &c, int64_t hv, int64_t width) {
    return data + (c.row * p.stored_heads + hv - p.stored_begin) * width;
}

// A state of a [slots, heads, K, Vw] tensor.
template <class E>
__device__ __forceinline__ E *state_at(E *states, int64_t slot, int64_t heads, int64_t head, int K, int Vw) {
    return states + (slot * heads + head) * K * Vw;
}

// A row of per-token fp32 values [HV, B * T] into shared memory, zero from `length` on.
template <class Params>
__device__ __forceinline__ void load_scalars(float *to, const float *from, const Params &p, const Chunk &c,
                                             int64_t hv) {
    const int i = threadIdx.x;
    if (i < C) to[i] = i < c.length ? from[hv * (p.B * p.T) + c.row + i] : 0.0f;
}

// ---- states -----------------------------------------------------------------------------------------------------

// A user's state tensor [N, HV, K, V] (strides already swapped for [N, HV, V, K]), any floating dtype and strides; null:
// zeros.
struct StateView {
    void *data;
    int32_t dtype;  // cake_gdn_dtype
    int64_t sequence, head, k, v;
};

__device__ __forceinline__ float state_value(const StateView &s, int64_t offset) {
    switch (s.dtype) {
        case CAKE_GDN_BF16: return __bfloat162float(static_cast<const ptx::bf16 *>(s.data)[offset]);
        case CAKE_GDN_FP16: return __half2float(static_cast<const ptx::fp16 *>(s.data)[offset]);
        case CAKE_GDN_FP32: return static_cast<const float *>(s.data)[offset];
        default: return static_cast<float>(static_cast<const double *>(s.data)[offset]);
    }
}

// Columns column..column + 7 of row `row` < K of a user's state that is not null, rounded to E; zero from V on.
template <class E>
__device__ __forceinline__ uint4 user_state_piece(const StateView &view, int64_t n, int64_t hv, int row, int column,
                                                  int V) {
    const int64_t at = n * view.sequence + hv * view.head + row * view.k + column * view.v;
    const auto pair = [&](int e) {
        return ptx::pack<E>(column + e < V ? state_value(view, at + e * view.v) : 0.0f,
                            column + e + 1 < V ? state_value(view, at + (e + 1) * view.v) : 0.0f);
    };
    return make_uint4(pair(0), pair(2), pair(4), pair(6));
}

// sum += a.b of eight elements, in pairs ascending.
template <class E>
__device__ __forceinline__ void add_products(float &sum, const uint4 &a, const uint4 &b) {
    const uint32_t left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const float2 x = ptx::unpack<E>(left[e]), y = ptx::unpack<E>(right[e]);
        sum += x.x * y.x + x.y * y.y;
    }
}

// Rows and columns of a user's state, rounded to E, into a tile of 128 rows x Width columns that starts at column
// `v0`; zero outside K x V, and everywhere when the view is null. Synchronous; the caller places the barrier.
template <class E, int Width>
__device__ __forceinline__ void load_user_state(Tile<Width> tile, const StateView &view, int64_t n, int64_t hv, int K,
                                                int V, int v0, int threads) {
    const int64_t from = n * view.sequence + hv * view.head;
    for (int i = threadIdx.x; i < 128 * Width / 2; i += threads) {
        const int row = i / (Width / 2), column = i % (Width / 2) * 2;
        float value[2] = {0.0f, 0.0f};
        if (view.data != nullptr && row < K) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                if (v0 + column + e < V) value[e] = state_value(view, from + row * view.k + (v0 + column + e) * view.v);
            }
        }
        tile.store_pair(row, column, ptx::pack<E>(value[0], value[1]));
    }
}

}  // namespace cake_gdn::cuda
