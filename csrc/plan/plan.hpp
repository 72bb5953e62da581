// The plan of a call: a pure function of sizes, dtypes, options and device traits. No pointer and no value of a tensor
// reaches this file, so a plan cannot depend on one: that is what keeps a replayed graph and a packed batch on the same
// bits. Every size formula of the library is here, and only here.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace cake_gdn::plan {

inline constexpr int64_t kChunk = 64;      // tokens of a chunk
inline constexpr int64_t kAlignment = 64;  // bytes, of every buffer on the host: a cache line, the widest vector

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// The problem's scratch has more bytes than 64 bits count.
struct TooLarge : std::length_error {
    using std::length_error::length_error;
};

// What a plan may know about a problem.
struct Shape {
    int64_t B, T, H, HV, K, V, N;
    bool packed;          // cu_seqlens given
    int64_t state_bytes;  // of one element of the state: 4, or 8 for fp64 inputs
    bool backward;
    bool saved_states;    // h given: written by the forward, read by the backward
    bool gate_gradients;  // dA_log or ddt_bias wanted

    int64_t group() const { return HV / H; }
    // Most chunks that one sequence can have.
    int64_t sequence_chunks() const { return ceil_div(T, kChunk); }
};

// What a plan may know about the device.
struct Traits {
    int host_threads = 1;  // the caller's limit
};

// Rows of the saved states for the chunks that are not the first of their sequence. A chunk that starts at token t of
// its batch row owns row t / kChunk - 1: two such chunks start at least kChunk tokens apart, so rows never collide,
// whatever the packing, and neither the count nor the row needs the offsets.
static inline int64_t state_slots(int64_t B, int64_t T) { return B * (std::max<int64_t>(T - 1, 0) / kChunk); }
static inline int64_t state_slot(int64_t b, int64_t T, int64_t token) {
    return b * ((T - 1) / kChunk) + token / kChunk - 1;
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
    Buffer place(int64_t bytes, int first, int last);
    int64_t size() const { return size_; }

private:
    struct Placed {
        Buffer buffer;
        int first, last;
    };
    std::vector<Placed> placed_;  // sorted by offset
    int64_t size_ = 0;
};

// Stages of one chunk on the CPU, in the order in which they run; they bound the lives of the scratch buffers.
enum CpuStage : int {
    kScan,     // keys, gates, corrected values; in the forward also the output and the next state
    kAdjoint,  // gradients of the corrected values and of the right-hand side
    kScores,   // gradients of the two score products
    kQuery,    // products with the chunk's starting state: dq, part of dk
    kKey,      // products with the gradient of its final state: rest of dk
    kEnd
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

}  // namespace cake_gdn::plan
