// gate_backward: gradients of the gate's and the step size's inputs from those of cum and step.
//
//     draw_t  = sum of dcum_i over t <= i before the next reset, exactly 0 at a reset
//     dg_t    = draw_t, or draw_t (-exp(A_log) sigmoid(g_t + dt_bias)) with CAKE_GDN_GATE     (tile/gate_math.cuh)
//     dbeta_t = dstep_t, or dstep_t times the sigmoid's slope
//     partials[chunk, hv] = (sum_t draw_t raw_t, sum_t dg_t): the chunk's share of dA_log and ddt_bias
//
// [HV, B * T] in, [B, T, HV] out. A zero slope clears whatever it meets. Chunks of no sequence write nothing.
//
// Work map. One block of eight warps a (chunk, tile of at most 32 heads). All threads bring dcum, the resets and dstep
// into shared memory along the tokens, then raw gates and slopes from g, and dbeta in dstep's place, along the shorter
// of the inputs' strides. Warp 0, a lane a head, sums against the tokens; at last all threads store along the shorter
// of the outputs'. Memory bound but for the chain of 64 additions, about 2 us, which the SM's other blocks hide.
//
// Shared memory: dcum (then dg), dstep, raw and slope [32, 65] fp32, reset [32, 68] bytes, heads' parameters: 36 KB.
// Summation order: tokens descending, all three sums, in double, rounded once.
#include "cuda/chain.hpp"
#include "cuda/programs.hpp"
#include "cuda/tile/gate_math.cuh"

namespace cake_gdn::cuda {

namespace {

struct Smem {
    float dg[kHeadTile][kPitch];  // dcum first
    float dstep[kHeadTile][kPitch];
    float raw[kHeadTile][kPitch];
    float slope[kHeadTile][kPitch];
    uint8_t reset[kHeadTile][kResetPitch];
    GateHead heads[kHeadTile];
};

// One lane: dcum -> dg in place, and the sums for the parameters. A step's operands are loaded ahead of its chain.
__device__ __forceinline__ double2 sum_tokens(Smem &s, int head, int length) {
    constexpr int kStep = 8;
    double sum = 0.0, dA_log = 0.0, ddt_bias = 0.0;
#pragma unroll 1
    for (int first = (length - 1) / kStep * kStep; first >= 0; first -= kStep) {
        float dcum[kStep], raw[kStep], slope[kStep];
        bool reset[kStep];
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
            const bool exists = first + i < length;
            dcum[i] = exists ? s.dg[head][first + i] : 0.0f;
            raw[i] = exists ? s.raw[head][first + i] : 0.0f;
            slope[i] = exists ? s.slope[head][first + i] : 0.0f;
            reset[i] = s.reset[head][first + i] == first + i + 1;
        }
#pragma unroll
        for (int i = kStep - 1; i >= 0; --i) {
            sum += static_cast<double>(dcum[i]);
            const float draw = static_cast<float>(sum), dg = masked(draw, slope[i]);
            sum = reset[i] ? 0.0 : sum;
            dA_log += static_cast<double>(masked(draw, raw[i]));
            ddt_bias += static_cast<double>(dg);
            s.dg[head][first + i] = dg;
        }
    }
    return {dA_log, ddt_bias};
}

__global__ void __launch_bounds__(kScalarThreads)
    gate_backward(const __grid_constant__ cake_gdn_gate_backward_params p) {
    __shared__ Smem s;
    const int64_t tiles = head_tiles(p.HV);
    const Chunk c = chunk_at(p, blockIdx.x / tiles);
    if (c.sequence < 0) return;
    const HeadTile heads = head_tile(p.HV, blockIdx.x % tiles);
    const int thread = threadIdx.x;
    const int64_t tokens = p.B * p.T;
    const bool gates = p.dg != nullptr || p.partials != nullptr;
    if (thread < heads.count) s.heads[thread] = gate_head(p, heads.first + thread);
    if (gates) {
        load_each(p.dcum, tokens, heads, c, [&](const Place &at, float dcum) { s.dg[at.head][at.token] = dcum; });
        load_each(p.reset, tokens, heads, c,
                  [&](const Place &at, uint8_t reset) { s.reset[at.head][at.token] = reset; });
    }
    if (p.dbeta != nullptr) {
        load_each(p.dstep, tokens, heads, c, [&](const Place &at, float dstep) { s.dstep[at.head][at.token] = dstep; });
    }
    __syncthreads();
    if (gates) {
        load_each(CAKE_GDN_SCALARS_OF(p, g), heads, c, [&](const Place &at, float g) {
            // At a reset, where both may be infinite, nothing comes of them.
            const Valued gate = gate_of(p, g, s.heads[at.head]);
            const bool reset = s.reset[at.head][at.token] == at.token + 1;
            s.raw[at.head][at.token] = reset ? 0.0f : gate.value;
            s.slope[at.head][at.token] = reset ? 0.0f : gate.slope;
        });
    }
    if (p.dbeta != nullptr) {
        load_each(CAKE_GDN_SCALARS_OF(p, beta), heads, c, [&](const Place &at, float beta) {
            float &dstep = s.dstep[at.head][at.token];
            dstep = masked(dstep, step_of(p, beta).slope);
        });
    }
    __syncthreads();
    if (gates && thread < heads.count) {
        const double2 sums = sum_tokens(s, thread, c.length);
        if (p.partials != nullptr) {
            float *to = p.partials + (blockIdx.x / tiles * p.HV + heads.first + thread) * 2;
            to[0] = static_cast<float>(sums.x);
            to[1] = static_cast<float>(sums.y);
        }
    }
    __syncthreads();
    if (p.dg != nullptr) {
        store_each(CAKE_GDN_SCALARS_OF(p, dg), heads, c, [&](const Place &at) { return s.dg[at.head][at.token]; });
    }
    if (p.dbeta != nullptr) {
        store_each(CAKE_GDN_SCALARS_OF(p, dbeta), heads, c,
                   [&](const Place &at) { return s.dstep[at.head][at.token]; });
    }
}

}  // namespace

void run_gate_backward(const cake_gdn_gate_backward_params &p, void *stream) {
    const char *fault = gate_inputs_fault(p);
    const bool gates = p.dg != nullptr || p.partials != nullptr;
    if (!fault && p.partials && !(p.flags & CAKE_GDN_GATE)) fault = "partials need the in-kernel gate";
    if (!fault && p.dg && !is_floating(p.dg_dtype)) fault = "dg_dtype must be floating";
    if (!fault && p.dbeta && !is_floating(p.dbeta_dtype)) fault = "dbeta_dtype must be floating";
    if (!fault && p.B * p.T > 0 && gates && (!p.g || !p.dcum || !p.reset)) {
        fault = "g, dcum and reset must not be null with dg or partials";
    }
    if (!fault && p.B * p.T > 0 && p.dbeta && (!p.beta || !p.dstep)) {
        fault = "beta and dstep must not be null with dbeta";
    }
    if (fault) {
        throw Error(CAKE_GDN_INVALID_ARGUMENT,
                    std::string("gate_backward: ") + fault + " (" + chain_arguments(p) + ")");
    }
    const int64_t blocks = gates || p.dbeta ? p.max_chunks * head_tiles(p.HV) : 0;
    run_blocks("gate_backward", p, blocks, 0, kScalarThreads, stream, gate_backward, gate_backward);
}

}  // namespace cake_gdn::cuda
