// The plan of a call: a pure function of sizes, dtypes, options and device traits. No pointer and no value of a tensor
// reaches this file, so a plan cannot depend on one: that is what keeps a replayed graph and a packed batch on the same
// bits. Every size formula of the library is here, and only here.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace cake_gdn::plan {

inline constexpr int64_t kChunk = 64;          // tokens of a chunk
inline constexpr int64_t kAlignment = 64;      // bytes, of every buffer on the host: a cache line, the widest vector
inline constexpr int64_t kGpuAlignment = 256;  // bytes, of every buffer on a device

static constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// The problem's scratch has more bytes than 64 bits count.
struct TooLarge : std::length_error {
    using std::length_error::length_error;
};

// The text that pins a plan's choices is wrong.
struct InvalidPlan : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

// What a plan may know about a problem.
struct Shape {
    int64_t B, T, H, HV, K, V, N;
    int64_t state_bytes;  // of one element of the state: 4, or 8 for fp64 inputs
    bool backward;
    bool saved_states;    // h given: written by the forward, read by the backward
    bool gate_gradients;  // dA_log or ddt_bias wanted
    // On a GPU: which rows have to be copied before they can be read, because of their strides, their alignment or the
    // in-kernel normalisation.
    bool normalise, pack_qk, pack_v, pack_do;
    // Gradients that lie as the chain's own [B * T, heads, W] buffers do, and so can be those until they are written.
    bool dense_dq, dense_dk, dense_dv;
    bool batch_invariant;
    bool fp16;  // q, k, v and the intermediates, whose range ends at 65504

    int64_t group() const { return HV / H; }
    // Most chunks that one sequence can have.
    int64_t sequence_chunks() const { return ceil_div(T, kChunk); }
};

// What a plan may know about the device.
struct Traits {
    int host_threads = 1;  // the caller's limit
    // A GPU's.
    int capability = 0;  // 10 * major + minor
    int multiprocessors = 0;
};

// Choices of a GPU plan that the caller takes, from cake_gdn_problem.plan: "segment=32,tail=separate".
struct Pins {
    enum class Tail { kAny, kFused, kSeparate };
    int64_t segment_chunks = 0;  // 0: the planner's choice
    Tail tail = Tail::kAny;
};
inline constexpr int64_t kWholeSequences = INT32_MAX;  // a segment length that cuts nothing

// `text` may be null: nothing is pinned. Throws InvalidPlan.
Pins parse_pins(const char *text);

// Rows of the saved states for the chunks that are not the first of their sequence. A chunk that starts at token t of
// its batch row owns row t / kChunk - 1: two such chunks start at least kChunk tokens apart, so rows never collide,
// whatever the packing, and neither the count nor the row needs the offsets.
static inline int64_t state_slots(int64_t B, int64_t T) { return B * (std::max<int64_t>(T - 1, 0) / kChunk); }
static inline int64_t state_slot(int64_t b, int64_t T, int64_t token) {
    return b * ((T - 1) / kChunk) + token / kChunk - 1;
}

// A size: a product that is checked. The limit lies far below 2^63, so that sums of a few sizes do not overflow either.
inline constexpr int64_t kLargestSize = int64_t(1) << 58;

template <class... Factors>
static inline int64_t product(int64_t first, Factors... factors) {
    int64_t result = first;
    const auto multiply = [&](int64_t factor) {
        if (__builtin_mul_overflow(result, factor, &result) || result > kLargestSize) {
            throw TooLarge("N, H, HV, K, V, T and num_threads need more scratch than 64-bit sizes can say");
        }
    };
    (multiply(factors), ...);
    return result;
}

// A byte range of a workspace.
struct Buffer {
    int64_t offset = 0;
    int64_t bytes = 0;
};

// Places buffers in one arena. A buffer lives from stage `first` through stage `last`; two buffers share bytes only if
// their lives do not meet. Placement is first fit in the order of the calls, so it is the same everywhere.
class Arena {
public:
    explicit Arena(int64_t alignment = kAlignment) : alignment_(alignment) {}
    Buffer place(int64_t bytes, int first, int last);
    int64_t size() const { return size_; }

private:
    struct Placed {
        Buffer buffer;
        int first, last;
    };
    std::vector<Placed> placed_;  // sorted by offset
    int64_t alignment_;
    int64_t size_ = 0;
};

// Scratch of one host thread: row-major matrices of the state's type, rows padded to kAlignment bytes.
struct CpuScratch {
    int64_t Kp, Vp;                      // elements of a padded row
    Buffer q, k, kt;                     // [C, Kp], [C, Kp], [Kp, C]
    Buffer kk, qk, decay, lower, pairs;  // [C, C]
    Buffer x, u, y, d_o, du;             // [C, Kp or Vp], [C, Vp], ...
    Buffer ut;                           // [Vp, C]
    Buffer zq, wk;                       // [C, C] gradients of the score products
    Buffer dq, dk;                       // [C, Kp]
    Buffer st, dst;                      // [Vp, Kp]: transposed state, transposed state gradient
    Buffer state, dstate;                // [HV / H, Kp, Vp]
    Buffer checkpoints, states;          // [segments, HV / H, Kp, Vp], [segment, HV / H, Kp, Vp]: recomputed states
    int64_t bytes;
};

struct CpuPlan {
    int64_t units;          // (sequence, key head) pairs: the fixed partition of the work
    int threads;            // host threads that share the units
    int64_t segment;        // chunks between two checkpoints when the backward recomputes states
    CpuScratch scratch;     // relative to a thread's part of the workspace
    Buffer gate_partials;   // [N, HV, 2] doubles: each sequence's share of dA_log and ddt_bias
    int64_t thread_offset;  // first thread's scratch
    int64_t bytes;          // the whole workspace, with room to align its start
};

// Throws TooLarge.
CpuPlan plan_cpu(const Shape &shape, const Traits &traits);

// ---- the GPU chain ----------------------------------------------------------------------------------------------

// Elements of a padded row of an intermediate: 16 bytes of 16-bit elements (CAKE_GDN_WIDTH of cuda/params/).
static constexpr int64_t row_width(int64_t columns) { return round_up(columns, 8); }

// Entries of the chunk and the segment table that suffice for any offsets, reached by some. Every non-empty sequence takes
// one chunk with its first token, and another one with each further 64 tokens; every sequence takes one segment, and
// another one with each further 64 * segment_chunks tokens.
static inline int64_t table_chunks(int64_t tokens, int64_t N) {
    const int64_t filled = std::min(N, tokens);
    return filled + (tokens - filled) / kChunk;
}
static inline int64_t table_segments(int64_t tokens, int64_t N, int64_t segment_chunks) {
    return N + (tokens > 0 ? (tokens - 1) / kChunk / segment_chunks : 0);
}

// Largest value-head group of the fused tail: a cluster of as many blocks (CAKE_GDN_TAIL_GROUP of cuda/params/).
inline constexpr int64_t kTailGroup = 8;

struct GpuPlan {
    int64_t segment_chunks;  // chunks of a full segment of the tables
    int64_t max_chunks, max_segments;
    // Segments that the scans have to look at, and seams between segments of one sequence: what suffices for any offsets.
    int64_t scan_segments, seams;
    // Value heads of a slice, whole groups: those whose states and corrected values are held at a time, and of those the
    // ones whose parts of dq and dk are (backward; the fused tail has no parts). The last slice may have fewer.
    int64_t scan_heads, tail_heads;
    bool tail_fused;  // one program from the scans to dq, dk and dv instead of dqkwg, wy_backward and finalize
    // What lies in a gradient's memory until the fused tail, block by block, reads it and writes the gradient.
    bool q_in_dq, k_in_dk, du_in_dv;
    // Tables.
    Buffer offsets, sequence_chunk, sequence_segment, chunks, segments;
    // Per token and value head, of all heads; packed rows of all heads.
    Buffer cum, reset, step, q, k, v, d_o, q_rstd, k_rstd, dcum, dstep, partials;
    // Of a scan slice: [B * T, heads, W] or [slots, heads, K, W].
    Buffer A, w, u, h, dv, dh;
    // Of a scan slice, for the segments: [heads, max_chunks], and [seams, heads, ...] as in cuda/params/. One set for both
    // directions.
    Buffer bound, seam_states, transitions, forgotten;
    // Of a tail slice, unless the tail is fused.
    Buffer dq, dk, dw;
    int64_t bytes;
};

// Chunks of a full segment; at least the longest sequence's when nothing is to be cut.
int64_t segment_length(const Shape &shape, const Traits &traits, const Pins &pins);

GpuPlan plan_gpu(const Shape &shape, const Traits &traits, const Pins &pins = {});

}  // namespace cake_gdn::plan
