// What the serial scans share: a state held by warps in registers, the chunks that a block walks over, and the ring of
// tiles between the warps that compute and those that move data.
//
// The state, transposed. One warp holds 16 columns v of the state S [K, V], all K (padded to 128), as the accumulators
// of a 16 x 128 product whose rows are v: packed to 16 bits they are, without leaving the registers, the left operand
// of everything that is multiplied by the state, and the chunk's vectors (tokens are accumulator columns) become the
// left operand of its update in the same way. A column of the state is one warp's from the first chunk to the last;
// warps exchange nothing, and a column's bits do not depend on how columns are dealt to blocks.
#pragma once

#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/store_matrix.cuh"
#include "cuda/tile/chunk.cuh"

namespace cake_gdn::cuda {

constexpr int kStateRows = 128;   // padded K
constexpr int kWarpColumns = 16;  // columns of the state that a warp holds
constexpr int kMovers = 64;  // threads that move data: two warps behind the computing ones, thread = token for gates

// Threads of a block of `Columns` columns.
template <int Columns>
constexpr int kScanThreads = Columns / kWarpColumns * 32 + kMovers;

// ---- registers ----------------------------------------------------------------------------------------------------

// Lane t, register [j][2 b + e]: S(k = 8 j + 2 (t % 4) + e, v = v0 + t / 4 + 8 b).
using State = float[kStateRows / 8][4];

// Calls inside(element of the lane, its address in a strided state) for the elements inside rows x columns and
// outside(element) for the others; `from` is the address of the warp's (0, v0).
template <class S, class Inside, class Outside>
__device__ __forceinline__ void for_state(State &state, S *from, const StateView &view, int rows, int columns,
                                          Inside &&inside, Outside &&outside) {
    const int lane = threadIdx.x % 32, k = 2 * (lane % 4), v = lane / 4;
    S *at = from + k * view.k + v * view.v;
    S *pointers[4] = {at, at + view.k, at + 8 * view.v, at + view.k + 8 * view.v};
#pragma unroll
    for (int j = 0; j < kStateRows / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (8 * j + k + i % 2 < rows && v + i / 2 * 8 < columns) {
                inside(state[j][i], pointers[i]);
            } else {
                outside(state[j][i]);
            }
            pointers[i] += 8 * view.k;
        }
    }
}

template <class S>
__device__ __forceinline__ void load_state_elements(State &state, const S *from, const StateView &view, int rows,
                                                    int columns) {
    for_state(
        state, from, view, rows, columns, [](float &value, const S *at) { value = static_cast<float>(*at); },
        [](float &value) { value = 0.0f; });
}

// The warp's columns v0.. of a user's state; zero outside K x V, and everywhere when the view is null.
__device__ __forceinline__ void load_state(State &state, const StateView &view, int64_t n, int64_t hv, int K, int V,
                                           int v0) {
    const int64_t from = n * view.sequence + hv * view.head + v0 * view.v;
    const int columns = view.data == nullptr ? 0 : V - v0;
    switch (view.dtype) {
        case CAKE_GDN_BF16:
            return load_state_elements(state, static_cast<const ptx::bf16 *>(view.data) + from, view, K, columns);
        case CAKE_GDN_FP16:
            return load_state_elements(state, static_cast<const ptx::fp16 *>(view.data) + from, view, K, columns);
        case CAKE_GDN_FP64:
            return load_state_elements(state, static_cast<const double *>(view.data) + from, view, K, columns);
        default: return load_state_elements(state, static_cast<const float *>(view.data) + from, view, K, columns);
    }
}

// The warp's columns into a user's fp32 state; nothing when the view is null.
__device__ __forceinline__ void store_state(State &state, const StateView &view, int64_t n, int64_t hv, int K, int V,
                                            int v0) {
    if (view.data == nullptr) return;
    float *to = static_cast<float *>(view.data) + n * view.sequence + hv * view.head + v0 * view.v;
    for_state(state, to, view, K, V - v0, [](float value, float *at) { *at = value; }, [](float) {});
}

__device__ __forceinline__ void clear(State &state) {
#pragma unroll
    for (int j = 0; j < kStateRows / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) state[j][i] = 0.0f;
    }
}

// State <- factor * state; a zero factor (after a reset) clears it whatever it holds. The test is uniform and rare.
__device__ __forceinline__ void decay_state(State &state, float factor) {
    if (factor == 0.0f) clear(state);
#pragma unroll
    for (int j = 0; j < kStateRows / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) state[j][i] *= factor;
    }
}

// Mirror of Tile::load_a<true>: a left operand, 16 x 16 at (m, k), to a tile whose rows run over k.
template <int Width>
__device__ __forceinline__ void store_a_transposed(Tile<Width> tile, const uint32_t (&r)[4], int m, int k) {
    const int lane = threadIdx.x % 32, q = lane / 8, row = lane % 8;
    ptx::stmatrix_transposed(tile.piece(k + row + (q >> 1) * 8, m + (q & 1) * 8), r);
}

// Replaces each register of a left operand whose k runs over tokens by f(its two values, token of the first, register);
// `step` is the operand's k step in the chunk.
template <class E, class F>
__device__ __forceinline__ void for_token_pairs(uint32_t (&r)[4], int step, F &&f) {
    const int token = 16 * step + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = f(ptx::unpack<E>(r[i]), token + i / 2 * 8, i);
}

// ---- chunks -------------------------------------------------------------------------------------------------------

// Consecutive chunks of one sequence. They are 64 tokens and one slot apart, so that two entries of the table tell all.
struct ChunkRange {
    Chunk origin;   // the first of them
    int64_t count;  // may be 0: nothing else is set then
    int tail;       // length of the last of them
    bool ends;      // which is the last of its sequence

    __device__ __forceinline__ Chunk at(int64_t i) const {
        Chunk c = origin;
        c.row += i * C;
        c.t += i * C;
        c.slot += i;
        c.first = origin.first && i == 0;
        c.last = ends && i == count - 1;
        c.length = i == count - 1 ? tail : C;
        return c;
    }
};

// Chunks [first, last) of the table, all of one sequence.
template <class Params>
__device__ __forceinline__ ChunkRange chunk_range(const Params &p, int64_t first, int64_t last) {
    ChunkRange range = {};
    range.count = last - first;
    if (range.count > 0) {
        range.origin = chunk_at(p, first);
        const Chunk tail = chunk_at(p, last - 1);
        range.tail = tail.length;
        range.ends = tail.last;
    }
    return range;
}

// A chunk's gates on their way from global memory: what mover `token` needs for its token's factors. The formulas are
// those of Gates (chunk.cuh).
struct TokenGates {
    float cum, end;        // cumulative log decay at the token and at the chunk's last token
    int reset, end_reset;  // last reset plus one, at the same
    bool inside;           // the token is one of the chunk's

    __device__ __forceinline__ float to_end(int token) const {
        return inside && token + 1 >= end_reset ? exp_of(end - cum) : 0.0f;
    }
    __device__ __forceinline__ float from_start() const { return inside && reset == 0 ? exp_of(cum) : 0.0f; }
    // from_start of the last token: what the chunk keeps of the state.
    __device__ __forceinline__ float keep() const { return end_reset == 0 ? exp_of(end) : 0.0f; }
};

template <class Params>
__device__ __forceinline__ TokenGates load_token_gates(const Params &p, const Chunk &c, int64_t hv, int token) {
    const int64_t row = hv * (p.B * p.T) + c.row, last = row + c.length - 1, at = min(row + token, last);
    return {p.cum[at], p.cum[last], p.reset[at], p.reset[last], token < c.length};
}

// ---- tiles between global and shared memory, moved by the movers --------------------------------------------------

// Which pieces of a tile a mover handles: those at `column` (and 64 columns on) of rows row, row + kDown, ... The same
// in copy_columns and store_columns, so that a mover refills only what it has itself read. kDown is a multiple of the
// swizzle's period: a mover's shared addresses differ by constants.
template <int Width>
struct Share {
    static constexpr int kAcross = Width >= 64 ? 8 : Width / 8, kDown = kMovers / kAcross,
                         kRepeats = Width / 8 / kAcross;
    static_assert(kDown % 8 == 0 && kRepeats * kAcross * 8 == Width, "whole swizzle periods, whole rows");
    int row, column;
    __device__ __forceinline__ explicit Share(int mover) : row(mover / kAcross), column(mover % kAcross * 8) {}
};

// Starts the copy of `rows` x `columns` elements into a tile of C rows; zeros elsewhere. Rows 16-byte aligned.
template <class E, int Width>
__device__ __forceinline__ void copy_columns(Tile<Width> tile, const E *from, int64_t stride, int rows, int columns,
                                             int mover) {
    using S = Share<Width>;
    const S share(mover);
    const uint32_t to = tile.piece(share.row, share.column);
    const auto copy = [&](auto bytes_of) {
        const E *row = from + share.row * stride + share.column;
#pragma unroll
        for (int i = 0; i < C / S::kDown; ++i) {
#pragma unroll
            for (int r = 0; r < S::kRepeats; ++r) {
                ptx::copy_async(to + i * S::kDown * Tile<Width>::kRowBytes + 128 * r, row + 64 * r, bytes_of(i, r));
            }
            row += S::kDown * stride;
        }
    };
    if (rows == C && columns >= Width) {  // nearly always: no sizes to work out
        copy([](int, int) { return 16; });
    } else {
        copy([&](int i, int r) {
            return share.row + i * S::kDown < rows ? min(16, max(0, 2 * (columns - share.column - 64 * r))) : 0;
        });
    }
}

// Writes rows below `rows` and whole pieces of columns below `columns` of a tile of TileRows rows to global memory.
template <class E, int TileRows, int Width>
__device__ __forceinline__ void store_columns(Tile<Width> tile, E *to, int64_t stride, int rows, int columns,
                                              int mover) {
    using S = Share<Width>;
    static_assert(S::kRepeats == 1, "tiles of up to 64 columns");
    const S share(mover);
    const uint32_t from = tile.piece(share.row, share.column);
    uint4 bits[TileRows / S::kDown];
#pragma unroll
    for (int i = 0; i < TileRows / S::kDown; ++i) {
        bits[i] = ptx::load_shared_128(from + i * S::kDown * Tile<Width>::kRowBytes);
    }
    if (share.column >= columns) return;
    to += share.row * stride + share.column;
#pragma unroll
    for (int i = 0; i < TileRows / S::kDown; ++i) {
        if (share.row + i * S::kDown < rows) *reinterpret_cast<uint4 *>(to) = bits[i];
        to += S::kDown * stride;
    }
}

// Zeros in rows below `rows` and whole pieces of columns below `columns` of a matrix in global memory.
template <class E, int Width>
__device__ __forceinline__ void clear_columns(E *to, int64_t stride, int rows, int columns, int mover) {
    using S = Share<Width>;
    const S share(mover);
    if (share.column >= columns) return;
    to += share.row * stride + share.column;
    for (int row = share.row; row < rows; row += S::kDown) {
        *reinterpret_cast<uint4 *>(to) = make_uint4(0, 0, 0, 0);
        to += S::kDown * stride;
    }
}

// ---- the loop -----------------------------------------------------------------------------------------------------
//
// Steps 0..count-1 through a ring of `Stages` stages, one barrier of all `Threads` a step and one more after the last.
// The two roles have a loop each, so that neither's registers burden the other. A stage is filled again only by what
// comes after the barrier that ended its step.

constexpr int kStepBarrier = 1;

// The computing warps: compute(i, stage) works on what the barrier before it made ready.
template <int Stages, int Threads, class Compute>
__device__ __forceinline__ void compute_steps(int64_t count, Compute &&compute) {
    int stage = 0;
#pragma unroll 1
    for (int64_t i = 0; i < count; ++i) {
        ptx::barrier(kStepBarrier, Threads);
        compute(i, stage);
        stage = stage == Stages - 1 ? 0 : stage + 1;
    }
    ptx::barrier(kStepBarrier, Threads);
}

// The movers: Stages - 1 steps ahead fill(i, stage) starts the copies of step i (called with i >= count too, where it
// has nothing to copy), and one step behind drain(i, stage) stores what compute(i) left in its stage.
template <int Stages, int Threads, class Fill, class Drain>
__device__ __forceinline__ void move_steps(int64_t count, Fill &&fill, Drain &&drain) {
    static_assert(Stages >= 3, "fill(i) publishes the gates of step i - 1, a barrier before they are read");
#pragma unroll 1
    for (int i = 0; i < Stages - 1; ++i) {
        fill(i, i);
        ptx::commit_copies();
    }
    int stage = 0;
#pragma unroll 1
    for (int64_t i = 0; i <= count; ++i) {
        const int before = stage == 0 ? Stages - 1 : stage - 1;
        ptx::wait_copies<Stages - 2>();  // of Stages - 1 + i groups so far, that of step i is due
        ptx::barrier(kStepBarrier, Threads);
        if (i > 0) drain(i - 1, before);
        fill(i + Stages - 1, before);
        ptx::commit_copies();
        stage = stage == Stages - 1 ? 0 : stage + 1;
    }
}

}  // namespace cake_gdn::cuda
