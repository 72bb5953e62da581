// gate_reduce: gradients of the gate's parameters from the chunks' shares.
//
//     dA_log[hv]   = sum over the chunks of partials[chunk, hv, 0]
//     ddt_bias[hv] = sum over the chunks of partials[chunk, hv, 1]
//
// The number of chunks is the table's, sequence_chunk[N]; shares past it are not read. No chunk gives zeros.
//
// Work map. One block of eight warps a value head. Thread i takes the chunks i, i + 256, ...; eight loads in flight.
// 1 MB for 65536 tokens of 32 heads with what the sectors waste: the launch is the cost.
//
// Shared memory: a pair of doubles a thread, 4 KB.
// Summation order, in double: a thread's chunks ascending, then halves: thread i adds thread i + 128, then i + 64, ...
#include "cuda/chain.hpp"
#include "cuda/programs.hpp"
#include "cuda/tile/scalars.cuh"

namespace cake_gdn::cuda {

namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ void store_scalar(void *to, int32_t dtype, int64_t offset, float value) {
    with_floating(dtype, [&](auto type) {
        using X = decltype(type);
        static_cast<X *>(to)[offset] = from_float<X>(value);
    });
}

__global__ void __launch_bounds__(kThreads) gate_reduce(const __grid_constant__ cake_gdn_gate_reduce_params p) {
    __shared__ double2 sums[kThreads];
    const int64_t hv = blockIdx.x;
    const int64_t chunks = p.max_chunks > 0 ? min(p.sequence_chunk[p.N], p.max_chunks) : 0;
    const float2 *partials = reinterpret_cast<const float2 *>(p.partials) + hv;
    double2 sum = {0.0, 0.0};
#pragma unroll 8
    for (int64_t chunk = threadIdx.x; chunk < chunks; chunk += kThreads) {
        const float2 share = __ldg(partials + chunk * p.HV);
        sum.x += static_cast<double>(share.x);
        sum.y += static_cast<double>(share.y);
    }
    sums[threadIdx.x] = sum;
    for (int half = kThreads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            sums[threadIdx.x].x += sums[threadIdx.x + half].x;
            sums[threadIdx.x].y += sums[threadIdx.x + half].y;
        }
    }
    if (threadIdx.x == 0) {
        const float dA_log = static_cast<float>(sums[0].x), ddt_bias = static_cast<float>(sums[0].y);
        if (p.dA_log != nullptr) store_scalar(p.dA_log, p.dA_log_dtype, hv * p.dA_log_stride, dA_log);
        if (p.ddt_bias != nullptr) store_scalar(p.ddt_bias, p.ddt_bias_dtype, hv * p.ddt_bias_stride, ddt_bias);
    }
}

}  // namespace

void run_gate_reduce(const cake_gdn_gate_reduce_params &p, void *stream) {
    const char *fault = nullptr;
    if (p.head_begin != 0 || p.heads != p.HV) fault = "head_begin and heads must be 0 and HV: all heads at once";
    if (p.max_chunks > 0 && !p.partials) fault = "partials must not be null";
    if (reinterpret_cast<uintptr_t>(p.partials) % 8) fault = "partials must be aligned to 8 bytes";
    if ((p.dA_log && !is_floating(p.dA_log_dtype)) || (p.ddt_bias && !is_floating(p.ddt_bias_dtype))) {
        fault = "dA_log_dtype and ddt_bias_dtype must be floating";
    }
    if (fault) {
        throw Error(CAKE_GDN_INVALID_ARGUMENT, std::string("gate_reduce: ") + fault + " (" + chain_arguments(p) + ")");
    }
    run_blocks("gate_reduce", p, p.dA_log || p.ddt_bias ? p.HV : 0, 0, kThreads, stream, gate_reduce, gate_reduce);
}

}  // namespace cake_gdn::cuda
