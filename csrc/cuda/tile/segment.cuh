// Segments: what a block of a scan or a pre-scan works on, the states at the seams between segments (params/), and how
// far back a segment remembers.
#pragma once

#include "cuda/tile/state.cuh"

namespace cake_gdn::cuda {

struct Segment {
    int64_t index;          // in the table
    int64_t chunk, chunks;  // its first chunk and how many: none of an empty sequence
    int sequence;           // -1: no segment, the block has nothing to do
    bool first, last;       // of its sequence

    __device__ __forceinline__ int64_t seam_before() const { return index - sequence - 1; }
    __device__ __forceinline__ int64_t seam_after() const { return index - sequence; }
};

template <class Params>
__device__ __forceinline__ Segment segment_at(const Params &p, int64_t index) {
    const cake_gdn_segment entry = p.segments[index];
    Segment s = {index, entry.chunk, entry.chunks, entry.sequence, false, false};
    if (entry.sequence >= 0) {
        s.first = p.sequence_segment[entry.sequence] == index;
        s.last = p.sequence_segment[entry.sequence + 1] == index + 1;
    }
    return s;
}

// ---- blocks -------------------------------------------------------------------------------------------------------

__host__ __device__ constexpr int blocks_of(int64_t columns, int width) {
    return static_cast<int>((columns + width - 1) / width);
}

// Blocks of a call whose heads take `column_blocks` blocks each.
template <class Params>
int64_t segment_blocks(const Params &p, int column_blocks) {
    return p.max_segments * p.heads * column_blocks;
}

// Columns of a scan's block, 32 or 64: 32, as long as every block then has a multiprocessor of its own. A function of
// shapes and the device; no bit of a result depends on it.
template <class Params>
int scan_columns(const Params &p, int multiprocessors) {
    return segment_blocks(p, blocks_of(p.V, 32)) <= multiprocessors || p.V <= 32 ? 32 : 64;
}

// What a block works on, by its index: a head's blocks of columns are neighbours, then heads, then segments.
struct ScanBlock {
    Segment segment;
    int head;          // of the slice
    int column_block;  // of the head
};

template <class Params>
__device__ __forceinline__ ScanBlock scan_block(const Params &p, int column_blocks) {
    const uint32_t blocks = static_cast<uint32_t>(column_blocks), heads = static_cast<uint32_t>(p.heads);
    const uint32_t unit = blockIdx.x / blocks;
    return {segment_at(p, unit / heads), static_cast<int>(unit % heads), static_cast<int>(blockIdx.x % blocks)};
}

// A pre-scan's heads have blocks for the columns of V, then for those of the transition.
template <class Params>
__host__ __device__ int prescan_blocks(const Params &p, int columns) {
    return blocks_of(p.V, columns) + blocks_of(p.K, columns);
}

struct PrescanBlock {
    Segment segment;
    int head;         // of the slice
    bool transition;  // its columns are the transition's
    int v0;           // the first of them
};

template <class Params>
__device__ __forceinline__ PrescanBlock prescan_block(const Params &p, int columns) {
    const ScanBlock block = scan_block(p, prescan_blocks(p, columns));
    const int values = blocks_of(p.V, columns);
    const bool transition = block.column_block >= values;
    return {block.segment, block.head, transition, (block.column_block - (transition ? values : 0)) * columns};
}

// ---- states at seams ----------------------------------------------------------------------------------------------

// Calls f(element, the next one, their address) for pairs of neighbouring rows of a state at a seam, [V, W of K] in
// fp32: the warp's columns v0.., all of their rows. Rows from K to W are zero.
template <class Params, class F>
__device__ __forceinline__ void for_seam(State &state, const Params &p, int64_t seam, int64_t head, int v0, F &&f) {
    const int lane = threadIdx.x % 32, width = CAKE_GDN_WIDTH(static_cast<int>(p.K));
    const int64_t from = (seam * p.heads + head) * p.V * width;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int v = v0 + lane / 4 + 8 * half;
        if (v >= p.V) continue;
        auto *at = p.seams + from + int64_t(v) * width + 2 * (lane % 4);
#pragma unroll
        for (int j = 0; j < kStateRows / 8; ++j) {
            if (8 * j < width) f(state[j][2 * half], state[j][2 * half + 1], at + 8 * j);
        }
    }
}

template <class Params>
__device__ __forceinline__ void load_seam(State &state, const Params &p, int64_t seam, int64_t head, int v0) {
    clear(state);
    for_seam(state, p, seam, head, v0, [](float &a, float &b, const float *at) {
        const float2 pair = *reinterpret_cast<const float2 *>(at);
        a = pair.x, b = pair.y;
    });
}
template <class Params>
__device__ __forceinline__ void store_seam(State &state, const Params &p, int64_t seam, int64_t head, int v0) {
    for_seam(state, p, seam, head, v0,
             [](float a, float b, float *at) { *reinterpret_cast<float2 *>(at) = make_float2(a, b); });
}

// The warp's columns v0.. of the state that a scan of a segment starts from: the user's where the sequence begins (or,
// against the order, ends), otherwise that at the seam.
template <class Params>
__device__ __forceinline__ void load_start(State &state, const Params &p, const StateView &user, bool outer,
                                           const Segment &segment, int64_t seam, int64_t head, int v0) {
    if (outer || p.seams == nullptr) {
        load_state(state, user, segment.sequence, p.head_begin + head, static_cast<int>(p.K), static_cast<int>(p.V),
                   v0);
    } else {
        load_seam(state, p, seam, head, v0);
    }
}

// Columns v0.. of what a pre-scan starts from: zero, or the identity [K, K] for the transition.
__device__ __forceinline__ void start_prescan(State &state, bool transition, int K, int v0) {
    const int lane = threadIdx.x % 32, k = 2 * (lane % 4), v = v0 + lane / 4;
#pragma unroll
    for (int j = 0; j < kStateRows / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = 8 * j + k + i % 2;
            state[j][i] = transition && row < K && row == v + i / 2 * 8 ? 1.0f : 0.0f;
        }
    }
}

// Two floats as the sums of two bf16 each: what they are short of is below 2^-17 of them. bf16 whatever the inputs are:
// it has the range of fp32.
__device__ __forceinline__ void split(float a, float b, uint32_t &high, uint32_t &low) {
    high = ptx::pack<ptx::bf16>(a, b);
    const float2 rounded = ptx::unpack<ptx::bf16>(high);
    low = ptx::pack<ptx::bf16>(a - rounded.x, b - rounded.y);
}

// Elements from one part of a transition [K, W of K] to the other, and of both.
template <class Params>
__device__ __forceinline__ int64_t transition_part(const Params &p) {
    return p.K * CAKE_GDN_WIDTH(p.K);
}
template <class Params>
__device__ __forceinline__ int64_t transition_at(const Params &p, int64_t seam, int64_t head) {
    return (seam * p.heads + head) * 2 * transition_part(p);
}

// The warp's columns v0.. of a transition, which are rows of its transpose in global memory.
template <class Params>
__device__ __forceinline__ void store_transition(const State &state, const Params &p, int64_t seam, int64_t head,
                                                 int v0) {
    const int lane = threadIdx.x % 32, k = 2 * (lane % 4), K = static_cast<int>(p.K), width = CAKE_GDN_WIDTH(K);
    ptx::bf16 *to = static_cast<ptx::bf16 *>(p.transitions) + transition_at(p, seam, head);
    const int64_t part = transition_part(p);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int v = v0 + lane / 4 + 8 * half;
        if (v >= K) continue;
        ptx::bf16 *row = to + int64_t(v) * width + k;
#pragma unroll
        for (int j = 0; j < kStateRows / 8; ++j) {
            uint32_t high, low;
            split(state[j][2 * half], state[j][2 * half + 1], high, low);
            if (8 * j + k >= width) continue;
            *reinterpret_cast<uint32_t *>(row + 8 * j) = high;
            *reinterpret_cast<uint32_t *>(row + 8 * j + part) = low;
        }
    }
}

// What a warp of a pre-scan leaves at the seam.
template <class Params>
__device__ __forceinline__ void store_prescan(State &state, const Params &p, const PrescanBlock &block, int64_t seam,
                                              int m0) {
    if (block.transition) {
        store_transition(state, p, seam, block.head, block.v0 + m0);
    } else {
        store_seam(state, p, seam, block.head, block.v0 + m0);
    }
}

// ---- memory -------------------------------------------------------------------------------------------------------

// A transition whose norm is below exp(-25) = 1.4e-11 is left out. Far below the precision of 16 bits, so that a state
// that is 10^4 times larger before the segment than behind it still leaves nothing: at exp(-10) that left an error of 7
// to 31 %.
constexpr float kForgotten = -25.0f;

// How many of a segment's chunks a pre-scan has to walk over, and whether the state beyond them is forgotten.
struct Reach {
    int64_t chunks;
    bool forgets;
};

// `bound`: those of the segment's `count` chunks for one head. They are added up from the segment's end, or from its
// start, until they fall below kForgotten: a ladder over 32 chunks in a warp, then the next 32, so that the answer
// depends on nothing but the segment. Whole warps call it; all get the same.
__device__ __forceinline__ Reach reach_of(const float *bound, int64_t count, bool from_end) {
    const int lane = threadIdx.x % 32;
    float before = 0.0f;
    for (int64_t base = 0; base < count; base += 32) {
        const int64_t i = base + lane;
        float sum = i < count ? bound[from_end ? count - 1 - i : i] : 0.0f;
#pragma unroll
        for (int delta = 1; delta < 32; delta *= 2) {
            const float other = __shfl_up_sync(0xffffffffu, sum, delta);
            if (lane >= delta) sum += other;
        }
        sum += before;
        const uint32_t below = __ballot_sync(0xffffffffu, i < count && sum < kForgotten);
        if (below != 0) return {base + __ffs(static_cast<int>(below)), true};
        before = __shfl_sync(0xffffffffu, sum, 31);
    }
    return {count, false};
}

}  // namespace cake_gdn::cuda
