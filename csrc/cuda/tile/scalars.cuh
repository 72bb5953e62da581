// Per-token scalars of the value heads: user tensors [B, T, HV] of any floating dtype and strides on one side,
// head-major shared memory and intermediates [HV, B * T] on the other.
//
// A block works on one chunk and one tile of value heads. The tile has 2^shift heads, at most 32, so that a small HV
// leaves no lane idle and a warp that walks over the heads reads whole lines of a [B, T, HV] tensor.
#pragma once

#include "cuda/tile/chunk.cuh"

namespace cake_gdn::cuda {

constexpr int kHeadTile = 32;
constexpr int kScalarThreads = 256;
constexpr int kScalarsOfThread = kHeadTile * C / kScalarThreads;
constexpr int kPitch = C + 1;       // floats of a head in shared memory: heads and tokens both meet every bank once
constexpr int kResetPitch = C + 4;  // bytes, for the same reason

__host__ __device__ constexpr int head_shift(int64_t HV) {
    int shift = 0;
    while ((1 << shift) < kHeadTile && (int64_t(1) << shift) < HV) ++shift;
    return shift;
}
__host__ __device__ constexpr int64_t head_tiles(int64_t HV) {
    return (HV + (int64_t(1) << head_shift(HV)) - 1) >> head_shift(HV);
}

// The heads of a block: `count` of them from `first` on, the tile's last ones may be missing.
struct HeadTile {
    int64_t first;
    int shift, count;
};
__device__ __forceinline__ HeadTile head_tile(int64_t HV, int64_t index) {
    const int shift = head_shift(HV);
    const int64_t first = index << shift;
    return {first, shift, static_cast<int>(min(HV - first, int64_t(1) << shift))};
}

__device__ __forceinline__ float to_float(ptx::bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(ptx::fp16 x) { return __half2float(x); }
__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(double x) { return static_cast<float>(x); }

template <class X>
__device__ __forceinline__ X from_float(float x) {
    if constexpr (__is_same(X, ptx::bf16)) {
        return __float2bfloat16_rn(x);
    } else if constexpr (__is_same(X, ptx::fp16)) {
        return __float2half_rn(x);
    } else {
        return static_cast<X>(x);
    }
}

// Calls f with a value of the element type. Outside of loops: the branch is the same for all threads.
template <class F>
__device__ __forceinline__ void with_floating(int32_t dtype, F &&f) {
    switch (dtype) {
        case CAKE_GDN_BF16: f(ptx::bf16()); break;
        case CAKE_GDN_FP16: f(ptx::fp16()); break;
        case CAKE_GDN_FP32: f(float()); break;
        default: f(double()); break;
    }
}
inline bool is_floating(int32_t dtype) { return dtype >= CAKE_GDN_BF16 && dtype <= CAKE_GDN_FP64; }

__device__ __forceinline__ float scalar_at(const void *data, int32_t dtype, int64_t offset) {
    float value = 0.0f;
    with_floating(dtype, [&](auto type) { value = to_float(static_cast<const decltype(type) *>(data)[offset]); });
    return value;
}

// A user's [B, T, HV] tensor; strides in elements.
struct Scalars {
    void *data;
    int32_t dtype;
    int64_t batch, token, head;
};
#define CAKE_GDN_SCALARS_OF(p, name)                                                                                   \
    ::cake_gdn::cuda::Scalars {                                                                                        \
        const_cast<void *>(static_cast<const void *>((p).name)), (p).name##_dtype, (p).name##_batch, (p).name##_token, \
            (p).name##_head                                                                                            \
    }

struct Place {
    int head, token;  // in the tile and in the chunk
    bool exists;
};

// How a block walks over its chunk and heads: neighbouring threads along the tokens or along the heads. A thread keeps
// its token or its head and goes on by a fixed step in the other.
class TileWalk {
public:
    __device__ __forceinline__ TileWalk(bool along_tokens, const HeadTile &heads, const Chunk &c)
        : heads_(heads.count),
          length_(c.length),
          head(along_tokens ? threadIdx.x / C : threadIdx.x & ((1 << heads.shift) - 1)),
          token(along_tokens ? threadIdx.x % C : threadIdx.x >> heads.shift),
          head_step(along_tokens ? kScalarThreads / C : 0),
          token_step(along_tokens ? 0 : kScalarThreads >> heads.shift) {}
    // This thread's element j < kScalarsOfThread.
    __device__ __forceinline__ Place operator[](int j) const {
        const int h = head + j * head_step, t = token + j * token_step;
        return {h, t, h < heads_ && t < length_};
    }

private:
    const int heads_, length_;

public:
    const int head, token, head_step, token_step;
};

// The same walk in a user's tensor.
struct TensorWalk : TileWalk {
    __device__ __forceinline__ TensorWalk(const Scalars &s, const HeadTile &heads, const Chunk &c)
        : TileWalk(llabs(s.token) < llabs(s.head), heads, c),
          first(c.b * s.batch + (c.t + token) * s.token + (heads.first + head) * s.head),
          step(head_step * s.head + token_step * s.token) {}
    const int64_t first, step;  // offsets in elements
};

// f(place, value) for every element of the block's chunk and heads that exists. All loads start before the first f.
template <class F>
__device__ __forceinline__ void load_each(const Scalars &s, const HeadTile &heads, const Chunk &c, F &&f) {
    const TensorWalk walk(s, heads, c);
    float value[kScalarsOfThread];
    with_floating(s.dtype, [&](auto type) {
        const auto *from = static_cast<const decltype(type) *>(s.data) + walk.first;
#pragma unroll
        for (int j = 0; j < kScalarsOfThread; ++j) value[j] = walk[j].exists ? to_float(from[j * walk.step]) : 0.0f;
    });
#pragma unroll
    for (int j = 0; j < kScalarsOfThread; ++j) {
        const Place at = walk[j];
        if (at.exists) f(at, value[j]);
    }
}

// The same for values of an intermediate [HV, B * T].
template <class X, class F>
__device__ __forceinline__ void load_each(const X *from, int64_t tokens, const HeadTile &heads, const Chunk &c, F &&f) {
    const TileWalk walk(true, heads, c);
    from += (heads.first + walk.head) * tokens + c.row + walk.token;
    X value[kScalarsOfThread];
#pragma unroll
    for (int j = 0; j < kScalarsOfThread; ++j) value[j] = walk[j].exists ? from[j * walk.head_step * tokens] : X(0);
#pragma unroll
    for (int j = 0; j < kScalarsOfThread; ++j) {
        const Place at = walk[j];
        if (at.exists) f(at, value[j]);
    }
}

// Stores f(place) to every element of the block's chunk and heads that exists.
template <class F>
__device__ __forceinline__ void store_each(const Scalars &s, const HeadTile &heads, const Chunk &c, F &&f) {
    const TensorWalk walk(s, heads, c);
    with_floating(s.dtype, [&](auto type) {
        using X = decltype(type);
        X *to = static_cast<X *>(s.data) + walk.first;
#pragma unroll
        for (int j = 0; j < kScalarsOfThread; ++j) {
            const Place at = walk[j];
            if (at.exists) to[j * walk.step] = from_float<X>(f(at));
        }
    });
}

}  // namespace cake_gdn::cuda
