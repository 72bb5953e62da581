// stitch: the states at a sequence's seams, from what the pre-scans made of each segment, one seam after the other:
//
//     X <- S + M X    from the initial state, in the order of the seams        (after fwd_prescan)
//     X <- dS + M^T X from dht, against the order                              (after adjoint_prescan)
//
// and X <- S where M is left out. S is in the seam's place in global memory, and X takes it.
//
// Tile map. One block a (sequence, value head, 64 columns of V), four warps that hold X^T [16 columns, 128] each in fp32
// registers and never talk to one another (tile/state.cuh):
//     X^T [16, 128] = X^T M^T + S^T    left operand: the state, packed in registers; right: M's tile, transposed
// All threads bring the next seam's M into the other half of shared memory meanwhile.
//
// Shared memory: 2 x (the two parts of M^T [128, 128], bf16, swizzled): 128 KB.
//
// Roundings and summation order. X is split in two bf16 parts as M is: what is left out of each is below 2^-17 of the
// element, and so is the product of the low parts, which is not formed. Against the 2^-9 (bf16) or 2^-12 (fp16) by which
// each chunk of a scan rounds the state, that is nothing. In one fp32 accumulator, for K ascending, 16 at a time: high X
// low M, low X high M, high X high M; then S is added.
#include "cuda/chain.hpp"
#include "cuda/programs.hpp"
#include "cuda/tile/segment.cuh"
#include "cuda/tile/transfer.cuh"

namespace cake_gdn::cuda {

namespace {

constexpr int BV = 64;
constexpr int kThreads = BV / kWarpColumns * 32;

struct Transition {
    alignas(128) char high[Tile<kStateRows>::bytes(kStateRows)], low[Tile<kStateRows>::bytes(kStateRows)];
};
struct Smem {
    Transition transitions[2];
};

__global__ void __launch_bounds__(kThreads, 1) stitch(const __grid_constant__ cake_gdn_stitch_params p) {
    extern __shared__ __align__(128) char memory[];
    Smem &smem = *reinterpret_cast<Smem *>(memory);
    const int K = static_cast<int>(p.K), V = static_cast<int>(p.V), Kw = CAKE_GDN_WIDTH(K);
    const uint32_t blocks = static_cast<uint32_t>(blocks_of(V, BV)), heads = static_cast<uint32_t>(p.heads),
                   unit = blockIdx.x / blocks;
    const int64_t n = unit / heads, head = unit % heads;
    const int v0 = static_cast<int>(blockIdx.x % blocks) * BV + static_cast<int>(threadIdx.x) / 32 * kWarpColumns;
    const int64_t first = p.sequence_segment[n], count = p.sequence_segment[n + 1] - first - 1;  // seams
    const auto seam_of = [&](int64_t i) { return first - n + (p.backward ? count - 1 - i : i); };
    const auto forgotten = [&](int64_t i) { return p.forgotten[seam_of(i) * p.heads + head] != 0; };
    const auto fetch = [&](int64_t i) {
        if (i < count && !forgotten(i)) {
            const ptx::bf16 *from = static_cast<const ptx::bf16 *>(p.transitions) + transition_at(p, seam_of(i), head);
            Transition &to = smem.transitions[i % 2];
            copy_rows<kThreads, kStateRows>(Tile<kStateRows>{ptx::shared_address(to.high)}, from, Kw, K, K);
            copy_rows<kThreads, kStateRows>(Tile<kStateRows>{ptx::shared_address(to.low)}, from + transition_part(p),
                                            Kw, K, K);
        }
        ptx::commit_copies();
    };
    if (count <= 0) return;

    State state;
    load_state(state, CAKE_GDN_STATE_OF(p, start), n, p.head_begin + head, K, V, v0);
    fetch(0);
#pragma unroll 1
    for (int64_t i = 0; i < count; ++i) {
        fetch(i + 1);
        uint32_t high[8][4], low[8][4];
#pragma unroll
        for (int j = 0; j < 16; ++j) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                split(state[j][2 * half], state[j][2 * half + 1], high[j / 2][j % 2 * 2 + half],
                      low[j / 2][j % 2 * 2 + half]);
            }
        }
        ptx::wait_copies<1>();
        __syncthreads();
        if (forgotten(i)) {
            load_seam(state, p, seam_of(i), head, v0);
        } else {
            const Tile<kStateRows> m_high{ptx::shared_address(smem.transitions[i % 2].high)},
                m_low{ptx::shared_address(smem.transitions[i % 2].low)};
            clear(state);
#pragma unroll
            for (int step = 0; step < 8; ++step) {
#pragma unroll
                for (int j = 0; j < 16; j += 2) {
                    uint32_t b[4];
                    m_low.load_b<true>(b, 8 * j, 16 * step);
                    ptx::mma<ptx::bf16>(state[j], high[step], b[0], b[1]);
                    ptx::mma<ptx::bf16>(state[j + 1], high[step], b[2], b[3]);
                    m_high.load_b<true>(b, 8 * j, 16 * step);
                    ptx::mma<ptx::bf16>(state[j], low[step], b[0], b[1]);
                    ptx::mma<ptx::bf16>(state[j + 1], low[step], b[2], b[3]);
                    ptx::mma<ptx::bf16>(state[j], high[step], b[0], b[1]);
                    ptx::mma<ptx::bf16>(state[j + 1], high[step], b[2], b[3]);
                }
            }
            for_seam(state, p, seam_of(i), head, v0, [](float &x, float &y, float *at) {
                float2 &s = *reinterpret_cast<float2 *>(at);
                s = make_float2(x += s.x, y += s.y);
            });
        }
        __syncthreads();  // this half of shared memory is filled again
    }
}

}  // namespace

void run_stitch(const cake_gdn_stitch_params &p, void *stream) {
    check_segments("stitch", p);
    run_blocks("stitch", p, p.max_segments == 0 ? 0 : p.N * p.heads * blocks_of(p.V, BV), sizeof(Smem), kThreads,
               stream, stitch, stitch);
}

}  // namespace cake_gdn::cuda
