// wy: the WY representation of a chunk: its updates, solved for.
//
//     A = (I + L)^-1,  L_ij = beta_i G_ij k_i.k_j for j < i;   w = A (beta e k),   u = A (beta v)
//
// Tile map. One block of four warps a (chunk, value head), value heads of a chunk next to each other so that k comes
// from L2. Warp i computes rows 16 i..16 i + 15 of L and the inverse of its diagonal block, then block column i of A
// (tile/inverse.cuh), then columns 32 i..32 i + 31 of w and u: a warp scales the rows of its columns of k and v in
// registers, each element once in the block, and writes the products over them. Blocks above the diagonal are left out;
// the first warps have little of L and much of A, the last ones the reverse. K and V are padded to 128 by zeros in
// shared memory.
//
// Shared memory, 43 KB, five blocks an SM: k, then w; v, then u: [64, 128], 16-bit, swizzled (tile.cuh). L and the
// diagonal's inverses, ten 16 x 16 blocks of fp32, then A [64, 64] in 16 bits, swizzled. Gates and factors 0.8 KB.
//
// Summation order: k k^T over K ascending; the inverse as in tile/inverse.cuh; w and u over tokens ascending.
#include "cuda/chain.hpp"
#include "cuda/programs.hpp"
#include "cuda/tile/inverse.cuh"
#include "cuda/tile/transfer.cuh"
#include "cuda/tile/wy.cuh"

namespace cake_gdn::cuda {

namespace {

constexpr int kThreads = 128;

struct Smem {
    alignas(128) char k[Tile<kD>::bytes(C)], v[Tile<kD>::bytes(C)];
    alignas(128) char inverse[LowerBlocks::kBytes];  // then A
    float cum[C], step[C], weight[C];                // weight: beta e
    float growth[4];                                 // each warp's tokens' (warp_growth)
    uint8_t reset[C];
};
static_assert(Tile<C>::bytes(C) <= LowerBlocks::kBytes, "A takes L's place");

template <class E>
__global__ void __launch_bounds__(kThreads, 5) wy(const __grid_constant__ cake_gdn_wy_params p) {
    extern __shared__ __align__(128) char memory[];
    Smem &s = *reinterpret_cast<Smem *>(memory);
    const auto [head, hv, hk] = block_heads(p);
    const Chunk c = block_chunk(p);
    if (c.sequence < 0) return;
    const int K = static_cast<int>(p.K), V = static_cast<int>(p.V), Kw = CAKE_GDN_WIDTH(K), Vw = CAKE_GDN_WIDTH(V);
    const Tile<kD> k{ptx::shared_address(s.k)}, v{ptx::shared_address(s.v)};
    const Tile<C> a{ptx::shared_address(s.inverse)};
    const LowerBlocks lower{reinterpret_cast<float *>(s.inverse)};

    const Rows k_rows = CAKE_GDN_ROWS_OF(p, k), v_rows = CAKE_GDN_ROWS_OF(p, v);
    copy_rows<kThreads, C>(k, rows_at<E>(k_rows, c, hk), k_rows.token, c.length, K);
    ptx::commit_copies();
    copy_rows<kThreads, C>(v, rows_at<E>(v_rows, c, hv), v_rows.token, c.length, V);
    ptx::commit_copies();
    const Gates gates{s.cum, s.reset};
    load_gates(gates, p, c, hv);
    load_scalars(s.step, p.step, p, c, hv);
    if (threadIdx.x < C) s.weight[threadIdx.x] = masked(gates.from_start(threadIdx.x), s.step[threadIdx.x]);

    const int warp = warp_index();
    ptx::wait_copies<1>();
    __syncthreads();
    const int lane = threadIdx.x % 32, r = lane / 4, column = 2 * (lane % 4), row = 16 * warp + r;
    const GateRow g[2] = {{gates, row, c.length}, {gates, row + 8, c.length}};
#pragma unroll
    for (int block = 0; block < 4; block += 2) {  // two blocks at a time, the second one may lie above the diagonal
        if (block > warp) break;
        float acc[1][4][4] = {};
        warp_gemm<E, false, false>(acc, k, 16 * warp, k, 16 * block, 0, kD);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const int at_block = block + t / 2, j = 16 * block + 8 * t + column;
            if (at_block > warp) break;
            const float2 cum = *reinterpret_cast<const float2 *>(s.cum + j);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float step = s.step[row + 8 * half];
                *reinterpret_cast<float2 *>(lower.at(warp, at_block, r + 8 * half, 8 * (t % 2) + column)) =
                    make_float2(masked(step * acc[0][t][2 * half], g[half].decay(j, cum.x)),
                                masked(step * acc[0][t][2 * half + 1], g[half].decay(j + 1, cum.y)));
            }
        }
    }
    if (p.bound != nullptr) s.growth[warp] = warp_growth<E>(k, s.step);
    __syncwarp();
    invert_diagonal(lower, warp);
    ptx::wait_copies<0>();
    __syncthreads();
    if (p.bound != nullptr && threadIdx.x == 0) {
        p.bound[head * p.max_chunks + blockIdx.x / static_cast<uint32_t>(p.heads)] =
            chunk_bound(gates, s.growth, c.length);
    }
    invert_columns<E>(lower, a, warp);
    __syncthreads();

    if (p.A != nullptr) {
        store_tile<kThreads, C>(a, static_cast<E *>(p.A) + (c.row * p.HV + hv) * C, p.HV * C, c.length, C);
    }
    apply_lower<E>(a, k, 32 * warp, s.weight);
    apply_lower<E>(a, v, 32 * warp, s.step);
    __syncthreads();
    store_tile<kThreads, C>(k, slice_at(static_cast<E *>(p.w), p, c, head, Kw), p.heads * Kw, c.length, Kw);
    store_tile<kThreads, C>(v, slice_at(static_cast<E *>(p.u), p, c, head, Vw), p.heads * Vw, c.length, Vw);
}

}  // namespace

void run_wy(const cake_gdn_wy_params &p, void *stream) {
    run_chunks("wy", p, sizeof(Smem), kThreads, stream, wy<ptx::bf16>, wy<ptx::fp16>);
}

}  // namespace cake_gdn::cuda
