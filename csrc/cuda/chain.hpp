// Launches of the chain's programs: what all of them check and how their grids are made.
#pragma once

#include "cuda/launch.hpp"
#include "cuda/stages.h"

namespace cake_gdn::cuda {

// The chain's programs take 16-bit inputs and heads up to this width.
constexpr int64_t kChainHead = 128;

template <class Params>
std::string chain_arguments(const Params &p) {
    const auto text = [](int64_t value) { return std::to_string(value); };
    return "B=" + text(p.B) + ", T=" + text(p.T) + ", N=" + text(p.N) + ", H=" + text(p.H) + ", HV=" + text(p.HV) +
           ", K=" + text(p.K) + ", V=" + text(p.V) + ", heads " + text(p.head_begin) + " to " +
           text(p.head_begin + p.heads) + ", dtype " + text(p.dtype);
}

template <class Params>
void check_chain(const char *program, const Params &p) {
    const auto reject = [&](const char *what) {
        throw Error(CAKE_GDN_INVALID_ARGUMENT, std::string(program) + ": " + what + " (" + chain_arguments(p) + ")");
    };
    if (p.dtype != CAKE_GDN_BF16 && p.dtype != CAKE_GDN_FP16) reject("dtype must be bf16 or fp16");
    if (p.B < 0 || p.T < 0 || p.N < 0 || p.H < 1 || p.HV < p.H || p.HV % p.H != 0) reject("sizes out of range");
    if (p.K < 1 || p.K > kChainHead || p.V < 1 || p.V > kChainHead) reject("K and V must be from 1 to 128");
    if (p.head_begin < 0 || p.heads < 1 || p.head_begin + p.heads > p.HV) reject("the slice of heads is out of range");
    if (p.max_chunks < 0 || (p.max_chunks > 0 && (!p.chunks || !p.sequence_chunk))) reject("tables missing");
}

// For the programs that work on segments (params/common.h).
template <class Params>
void check_segments(const char *program, const Params &p) {
    if (p.max_segments >= 0 && (p.max_segments == 0 || (p.segments && p.sequence_segment))) return;
    throw Error(CAKE_GDN_INVALID_ARGUMENT,
                std::string(program) + ": tables of segments missing (" + chain_arguments(p) + ")");
}

// One block a unit of work, in clusters of `cluster`; `blocks` = 0 launches nothing. The kernel for bf16 and the one for
// fp16.
template <class Params>
void run_blocks(const char *program, const Params &p, int64_t blocks, size_t shared_memory, int threads, void *stream,
                void (*bf16)(Params), void (*fp16)(Params), int cluster = 1) {
    check_chain(program, p);
    const Traits &device = traits(p.device);
    require_code(program, device);
    if (blocks == 0) return;
    const DeviceGuard guard(p.device);
    launch(Site{program, [&] { return chain_arguments(p); }}, device, {blocks, threads, shared_memory, cluster}, stream,
           p.dtype == CAKE_GDN_BF16 ? bf16 : fp16, Params(p));
}

// One block a (chunk, value head of the slice).
template <class Params>
void run_chunks(const char *program, const Params &p, size_t shared_memory, int threads, void *stream,
                void (*bf16)(Params), void (*fp16)(Params), int cluster = 1) {
    run_blocks(program, p, p.max_chunks * p.heads, shared_memory, threads, stream, bf16, fp16, cluster);
}

}  // namespace cake_gdn::cuda
