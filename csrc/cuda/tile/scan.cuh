// Prefix scans of one thread block.
//
// The order of combination is fixed by the lane and warp numbers (a shuffle ladder within a warp, then one over the
// warps' totals), so a scan of floats would repeat bit for bit too; the tables scan integers, where any order is exact.
#pragma once

#include <cstdint>

namespace cake_gdn::cuda {

struct Sum {
    static constexpr int64_t identity = 0;
    __device__ int64_t operator()(int64_t a, int64_t b) const { return a + b; }
};

struct Max {
    static constexpr int64_t identity = INT64_MIN;
    __device__ int64_t operator()(int64_t a, int64_t b) const { return a < b ? b : a; }
};

template <class Op>
__device__ inline int64_t warp_inclusive_scan(int64_t value) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) {
        const int64_t before = __shfl_up_sync(0xffffffffu, value, delta);
        if (lane >= delta) value = Op()(before, value);
    }
    return value;
}

struct Scan {
    int64_t before;  // op over the values of all threads with a smaller index
    int64_t total;   // op over the values of all threads
};

// All 32 * Warps threads call this together. `scratch` is shared memory of Warps values; it may be reused by the next
// call at once, since a call begins with a barrier.
template <class Op, int Warps>
__device__ inline Scan block_exclusive_scan(int64_t value, int64_t *scratch) {
    static_assert(Warps >= 1 && Warps <= 32, "one warp scans the warps' totals");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t inclusive = warp_inclusive_scan<Op>(value);
    __syncthreads();
    if (lane == 31) scratch[warp] = inclusive;
    __syncthreads();
    // Every warp scans the totals itself: cheaper than one more barrier.
    const int64_t totals = warp_inclusive_scan<Op>(lane < Warps ? scratch[lane] : Op::identity);
    const int64_t warps_before = __shfl_sync(0xffffffffu, totals, warp > 0 ? warp - 1 : 0);
    const int64_t lanes_before = __shfl_up_sync(0xffffffffu, inclusive, 1);
    Scan scan;
    scan.before = Op()(warp > 0 ? warps_before : Op::identity, lane > 0 ? lanes_before : Op::identity);
    scan.total = __shfl_sync(0xffffffffu, totals, Warps - 1);
    return scan;
}

}  // namespace cake_gdn::cuda
