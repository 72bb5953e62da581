// tables: cu_seqlens -> chunk and segment tables, on the device.
//
// Equations, for sequences n = 0..N-1 of R = B * T tokens (rows of the flattened batch), C = 64, S = segment_chunks:
//
//     c_n = max(clamp(cu_0), ..., clamp(cu_n)), clamp(x) = min(max(x, 0), R);   dense: c_n = n * T
//     chunks of n:    a_n = ceil((c_(n+1) - c_n) / C)
//     segments of n:  b_n = max(1, ceil(a_n / S))
//     sequence_chunk[n] = a_0 + ... + a_(n-1),  sequence_segment[n] = b_0 + ... + b_(n-1),  offsets[n] = c_n
//     chunk i:   n with sequence_chunk[n] <= i < sequence_chunk[n+1]; j = i - sequence_chunk[n];
//                token c_n + j C, length min(C, c_(n+1) - c_n - j C)
//     segment i: n likewise; j = i - sequence_segment[n]; chunks [sequence_chunk[n] + j S, + min(S, a_n - j S))
//
// The running maximum makes any offsets a list of disjoint sequences inside [0, R), so that sum(a) and sum(b) stay
// within the capacities whatever the device holds: no later program needs to distrust the tables.
//
// Work map. Two launches.
//   scan: one block. Its 1024 threads walk the sequences in tiles of 1024 * kItems; thread t owns the kItems sequences
//         from kItems * t on. Three block scans a tile (maximum, chunks, segments), carried from tile to tile in
//         registers. A tile is one round of loads and three scans, about 3 us by estimate: 1 tile up to 8192 sequences,
//         9 tiles for 70,000, where the operator's own time is milliseconds. Not worth a multi-block scan.
//   fill: one thread an entry of either table, grid-stride. The sequence is found by bisection in sequence_chunk or
//         sequence_segment (17 steps for 70,000 sequences, all hits in L2). Equal bounds are empty sequences; the
//         bisection lands past them. Entries past the count are marked with sequence -1.
//
// Shared memory (scan): 32 warp totals of int64 for each of the three scans, 768 bytes.
// Summation order: integers only, exact in any order.
#include <algorithm>
#include <string>

#include "cuda/launch.hpp"
#include "cuda/programs.hpp"
#include "cuda/tile/scan.cuh"
#include "plan/plan.hpp"

namespace cake_gdn::cuda {

namespace {

constexpr int kWarps = 32;
constexpr int kThreads = 32 * kWarps;  // of both kernels' blocks
constexpr int kItems = 8;              // sequences of a thread and tile
constexpr int64_t kFillBlocks = 1 << 16;

static_assert(sizeof(cake_gdn_chunk) == 16 && sizeof(cake_gdn_segment) == 16, "an entry is one 128-bit word");

// Sizes of the call as the kernels need them: the packed batch has one row.
struct Layout {
    const void *cu_seqlens;
    bool wide;      // int64 offsets
    int64_t row;    // tokens of a dense batch row
    int64_t total;  // B * T
    int64_t N;
    int64_t segment_chunks;
};

__device__ inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// clamp(cu_n) for n <= N.
__device__ inline int64_t offset_at(const Layout &layout, int64_t n) {
    if (layout.cu_seqlens == nullptr) return n * layout.row;
    const int64_t raw = layout.wide ? static_cast<const int64_t *>(layout.cu_seqlens)[n]
                                    : static_cast<const int32_t *>(layout.cu_seqlens)[n];
    return min(max(raw, int64_t(0)), layout.total);
}

__global__ void __launch_bounds__(kThreads)
    tables_scan(const Layout layout, int64_t *offsets, int64_t *sequence_chunk, int64_t *sequence_segment) {
    __shared__ int64_t scratch[3][kWarps];
    const int64_t N = layout.N;
    int64_t offset_carry = 0, chunk_carry = 0, segment_carry = 0;
    // The tile that holds index N, which is no sequence, writes the ends: hence n <= N.
    for (int64_t tile = 0; tile <= N; tile += int64_t(kThreads) * kItems) {
        const int64_t first = tile + int64_t(threadIdx.x) * kItems;
        int64_t bound[kItems + 1];  // running maximum over this thread's own offsets
#pragma unroll
        for (int j = 0; j <= kItems; ++j) {
            bound[j] = first + j <= N ? offset_at(layout, first + j) : 0;
            if (j > 0) bound[j] = max(bound[j], bound[j - 1]);
        }
        // The last one is the next thread's first: it belongs to that thread in the scan.
        const Scan offset = block_exclusive_scan<Max, kWarps>(bound[kItems - 1], scratch[0]);
        const int64_t before = max(offset_carry, offset.before);
        int64_t chunks = 0, segments = 0;
#pragma unroll
        for (int j = 0; j <= kItems; ++j) bound[j] = max(bound[j], before);
#pragma unroll
        for (int j = 0; j < kItems; ++j) {
            if (first + j >= N) break;
            const int64_t a = ceil_div(bound[j + 1] - bound[j], CAKE_GDN_CHUNK);
            chunks += a;
            segments += max(int64_t(1), ceil_div(a, layout.segment_chunks));
        }
        const Scan chunk = block_exclusive_scan<Sum, kWarps>(chunks, scratch[1]);
        const Scan segment = block_exclusive_scan<Sum, kWarps>(segments, scratch[2]);
        int64_t chunk_at = chunk_carry + chunk.before, segment_at = segment_carry + segment.before;
#pragma unroll
        for (int j = 0; j < kItems; ++j) {
            const int64_t n = first + j;
            if (n > N) break;
            offsets[n] = bound[j];
            sequence_chunk[n] = chunk_at;
            sequence_segment[n] = segment_at;
            const int64_t a = ceil_div(bound[j + 1] - bound[j], CAKE_GDN_CHUNK);
            chunk_at += a;
            segment_at += max(int64_t(1), ceil_div(a, layout.segment_chunks));
        }
        offset_carry = max(offset_carry, offset.total);
        chunk_carry += chunk.total;
        segment_carry += segment.total;
    }
}

// Largest n in [0, N) with start[n] <= i, for i < start[N].
__device__ inline int64_t owner(const int64_t *start, int64_t N, int64_t i) {
    int64_t low = 0, high = N;  // start[low] <= i < start[high]
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (start[middle] <= i) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// One 128-bit store; the entry's own alignment is 8 in C.
template <class Entry>
__device__ inline void store(Entry *where, const Entry &entry) {
    uint4 word;
    memcpy(&word, &entry, sizeof word);
    *reinterpret_cast<uint4 *>(where) = word;
}

__global__ void __launch_bounds__(kThreads)
    tables_fill(const int64_t *__restrict__ offsets, const int64_t *__restrict__ sequence_chunk,
                const int64_t *__restrict__ sequence_segment, int64_t N, int64_t segment_chunks, int64_t max_chunks,
                int64_t max_segments, cake_gdn_chunk *__restrict__ chunks, cake_gdn_segment *__restrict__ segments) {
    const int64_t stride = int64_t(gridDim.x) * kThreads;
    const int64_t chunk_count = sequence_chunk[N], segment_count = sequence_segment[N];
    for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < max_chunks + max_segments; i += stride) {
        if (i < max_chunks) {
            cake_gdn_chunk chunk = {0, -1, 0};
            if (i < chunk_count) {
                const int64_t n = owner(sequence_chunk, N, i);
                chunk.token = offsets[n] + (i - sequence_chunk[n]) * CAKE_GDN_CHUNK;
                chunk.sequence = static_cast<int32_t>(n);
                chunk.length = static_cast<int32_t>(min(int64_t(CAKE_GDN_CHUNK), offsets[n + 1] - chunk.token));
            }
            store(chunks + i, chunk);
        } else {
            const int64_t s = i - max_chunks;
            cake_gdn_segment segment = {0, -1, 0};
            if (s < segment_count) {
                const int64_t n = owner(sequence_segment, N, s);
                segment.chunk = sequence_chunk[n] + (s - sequence_segment[n]) * segment_chunks;
                segment.sequence = static_cast<int32_t>(n);
                segment.chunks = static_cast<int32_t>(min(segment_chunks, sequence_chunk[n + 1] - segment.chunk));
            }
            store(segments + s, segment);
        }
    }
}

[[noreturn]] void reject(const std::string &message) { throw Error(CAKE_GDN_INVALID_ARGUMENT, "tables: " + message); }

int64_t checked_tokens(const cake_gdn_tables_params &p) {
    constexpr int64_t kMaxTokens = int64_t(1) << 62;
    const auto text = [](int64_t value) { return std::to_string(value); };
    if (p.B < 0 || p.T < 0 || p.N < 0) reject("B, T and N must not be negative");
    if (p.N > INT32_MAX - 1) reject("N: got " + text(p.N) + ", at most 2147483646 sequences are allowed");
    if (p.cu_seqlens == nullptr) {
        if (p.N != p.B) reject("N: got " + text(p.N) + ", a dense batch has N = B = " + text(p.B));
    } else {
        if (p.B != 1) reject("B: got " + text(p.B) + ", must be 1 with cu_seqlens");
        if (p.cu_seqlens_dtype != CAKE_GDN_INT32 && p.cu_seqlens_dtype != CAKE_GDN_INT64) {
            reject("cu_seqlens_dtype: got " + text(p.cu_seqlens_dtype) + ", must be CAKE_GDN_INT32 or CAKE_GDN_INT64");
        }
    }
    if (p.B > 0 && p.T > kMaxTokens / p.B) reject("B * T: at most 2^62 tokens are allowed");
    const int64_t tokens = p.B * p.T;
    // A segment's number of chunks is stored in 32 bits.
    if (p.segment_chunks < 1 || p.segment_chunks > INT32_MAX) {
        reject("segment_chunks: got " + text(p.segment_chunks) + ", must be from 1 to 2147483647");
    }
    const int64_t chunks = plan::table_chunks(tokens, p.N);
    if (p.max_chunks < chunks) reject("max_chunks: got " + text(p.max_chunks) + ", needs " + text(chunks));
    const int64_t segments = plan::table_segments(tokens, p.N, p.segment_chunks);
    if (p.max_segments < segments) reject("max_segments: got " + text(p.max_segments) + ", needs " + text(segments));
    if (p.max_chunks > kMaxTokens || p.max_segments > kMaxTokens) reject("max_chunks, max_segments: at most 2^62");
    if (!p.offsets || !p.sequence_chunk || !p.sequence_segment || (!p.chunks && p.max_chunks > 0) ||
        (!p.segments && p.max_segments > 0)) {
        reject("offsets, sequence_chunk, sequence_segment, chunks and segments must not be null");
    }
    if (reinterpret_cast<uintptr_t>(p.chunks) % 16 || reinterpret_cast<uintptr_t>(p.segments) % 16) {
        reject("chunks and segments must be aligned to 16 bytes");
    }
    return tokens;
}

}  // namespace

void run_tables(const cake_gdn_tables_params &p, void *stream) {
    const int64_t tokens = checked_tokens(p);
    const Traits &device = traits(p.device);
    require_code("tables", device);
    const DeviceGuard guard(p.device);
    const Site site{"tables", [&] {
                        return "B=" + std::to_string(p.B) + ", T=" + std::to_string(p.T) +
                               ", N=" + std::to_string(p.N) + (p.cu_seqlens ? ", packed" : ", dense") +
                               ", segment_chunks=" + std::to_string(p.segment_chunks);
                    }};
    const Layout layout = {p.cu_seqlens, p.cu_seqlens_dtype == CAKE_GDN_INT64, p.T, tokens, p.N, p.segment_chunks};
    launch(site, device, {1, kThreads}, stream, tables_scan, layout, p.offsets, p.sequence_chunk, p.sequence_segment);
    const int64_t entries = p.max_chunks + p.max_segments;
    if (entries == 0) return;
    const int64_t blocks = std::min((entries + kThreads - 1) / kThreads, kFillBlocks);
    launch(site, device, {blocks, kThreads}, stream, tables_fill, static_cast<const int64_t *>(p.offsets),
           static_cast<const int64_t *>(p.sequence_chunk), static_cast<const int64_t *>(p.sequence_segment), p.N,
           p.segment_chunks, p.max_chunks, p.max_segments, p.chunks, p.segments);
}

}  // namespace cake_gdn::cuda
