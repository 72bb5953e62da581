// prep: cumulative log decays with their resets, and step sizes, of all value heads.
//
//     raw_i   = g_i, or -exp(A_log) softplus(g_i + dt_bias)          (tile/gate_math.cuh)
//     reset_i = 1 + the last j <= i with exp(raw_j) = 0 in fp32, or 0
//     cum_i   = sum of raw_j over reset_i <= j <= i                  j = reset_i - 1 itself counts as 0
//     step_i  = beta_i, or sigmoid(beta_i), or 2 sigmoid(beta_i)
//
// for the tokens i of a chunk; [B, T, HV] in, [HV, B * T] out. Tokens of no chunk are neither read nor written.
//
// Work map. One block of eight warps a (chunk, tile of at most 32 heads). All threads read g and beta along the shorter
// of their strides, eight elements each, all in flight, and leave raw and step in shared memory, heads first. Warp 0,
// a lane a head, then sums the tokens, while the other warps write the step sizes along the tokens; at last all write
// cum and reset. Memory bound but for the chain of 64 additions, about 1 us, which the SM's other blocks hide.
//
// Shared memory: raw (then cum) and step [32, 65] fp32, reset [32, 68] bytes, the heads' parameters: 19 KB.
// Summation order: tokens ascending, in double, rounded once a token: 64 gates near -20 end at -1280, where the 64
// roundings of an fp32 sum may cost 1e-3 of a factor exp(cum_i - cum_j).
#include "cuda/chain.hpp"
#include "cuda/programs.hpp"
#include "cuda/tile/gate_math.cuh"

namespace cake_gdn::cuda {

namespace {

struct Smem {
    float cum[kHeadTile][kPitch];  // raw gates first
    float step[kHeadTile][kPitch];
    uint8_t reset[kHeadTile][kResetPitch];
    GateHead heads[kHeadTile];
};

// One lane: raw -> cum in place, and the resets. It goes on to a multiple of kStep: what lies past the chunk's end
// reaches no token before it.
__device__ __forceinline__ void sum_tokens(float *cum, uint8_t *reset, int length) {
    constexpr int kStep = 16;
    double sum = 0.0;
    int last = 0;
#pragma unroll 1
    for (int first = 0; first < length; first += kStep) {
        float raw[kStep];
#pragma unroll
        for (int i = 0; i < kStep; ++i) raw[i] = cum[first + i];
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
            last = is_reset(raw[i]) ? first + i + 1 : last;
            sum = is_reset(raw[i]) ? 0.0 : sum + static_cast<double>(raw[i]);
            cum[first + i] = static_cast<float>(sum);
            reset[first + i] = static_cast<uint8_t>(last);
        }
    }
}

__global__ void __launch_bounds__(kScalarThreads) prep(const __grid_constant__ cake_gdn_prep_params p) {
    __shared__ Smem s;
    const int64_t tiles = head_tiles(p.HV);
    const Chunk c = chunk_at(p, blockIdx.x / tiles);
    if (c.sequence < 0) return;
    const HeadTile heads = head_tile(p.HV, blockIdx.x % tiles);
    const int thread = threadIdx.x;
    if (thread < heads.count) s.heads[thread] = gate_head(p, heads.first + thread);
    __syncthreads();
    load_each(CAKE_GDN_SCALARS_OF(p, g), heads, c,
              [&](const Place &at, float g) { s.cum[at.head][at.token] = gate_of(p, g, s.heads[at.head]).value; });
    load_each(CAKE_GDN_SCALARS_OF(p, beta), heads, c,
              [&](const Place &at, float beta) { s.step[at.head][at.token] = step_of(p, beta).value; });
    __syncthreads();

    // Element i of the tile, walked over along the tokens, in the outputs [HV, B * T].
    const auto each = [&](int begin, int threads, auto &&store) {
        for (int i = begin; i < heads.count * C; i += threads) {
            const int head = i / C, token = i % C;
            if (token < c.length) store(head, token, (heads.first + head) * (p.B * p.T) + c.row + token);
        }
    };
    if (thread < 32) {
        if (thread < heads.count) sum_tokens(s.cum[thread], s.reset[thread], c.length);
    } else {
        each(thread - 32, kScalarThreads - 32,
             [&](int head, int token, int64_t to) { p.step[to] = s.step[head][token]; });
    }
    __syncthreads();
    each(thread, kScalarThreads, [&](int head, int token, int64_t to) {
        p.cum[to] = s.cum[head][token];
        p.reset[to] = s.reset[head][token];
    });
}

}  // namespace

void run_prep(const cake_gdn_prep_params &p, void *stream) {
    const char *fault = gate_inputs_fault(p);
    if (!fault && p.B * p.T > 0 && (!p.g || !p.beta || !p.cum || !p.reset || !p.step)) {
        fault = "g, beta, cum, reset and step must not be null";
    }
    if (fault) {
        throw Error(CAKE_GDN_INVALID_ARGUMENT, std::string("prep: ") + fault + " (" + chain_arguments(p) + ")");
    }
    run_blocks("prep", p, p.max_chunks * head_tiles(p.HV), 0, kScalarThreads, stream, prep, prep);
}

}  // namespace cake_gdn::cuda
