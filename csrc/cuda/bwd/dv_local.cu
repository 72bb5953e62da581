// dv_local: what the outputs of a chunk say about its own corrected values.
//
//     dv_j = scale sum_{i>=j} G_ij (q_i.k_j) do_i
//
// Tile map. One block of four warps a (chunk, value head). Warp w has the rows j = 16 w.. of the transposed gated scores
// P^T [64, 64], from the diagonal tile on, which become the left operand of P^T do [64, V] without leaving the registers;
// V is padded to 128.
//
// Shared memory: k, q, then dv, and do: [64, 128], 16-bit, swizzled (tile.cuh): 48 KB, four blocks an SM; gates 320
// bytes.
//
// Summation order: over tokens i ascending from the diagonal tile on, 16 at a time inside the tensor core.
#include "cuda/chain.hpp"
#include "cuda/programs.hpp"
#include "cuda/tile/chunk.cuh"
#include "cuda/tile/transfer.cuh"
#include "cuda/tile/wy.cuh"

namespace cake_gdn::cuda {

namespace {

constexpr int kThreads = 128;

struct Smem {
    alignas(128) char k[Tile<kD>::bytes(C)];
    alignas(128) char q[Tile<kD>::bytes(C)];  // then dv, a warp its own rows
    alignas(128) char d_o[Tile<kD>::bytes(C)];
    float cum[C];
    uint8_t reset[C];
};

template <class E>
__global__ void __launch_bounds__(kThreads, 4) dv_local(const __grid_constant__ cake_gdn_dv_local_params p) {
    extern __shared__ __align__(128) char memory[];
    Smem &s = *reinterpret_cast<Smem *>(memory);
    const auto [head, hv, hk] = block_heads(p);
    const Chunk c = block_chunk(p);
    if (c.sequence < 0) return;
    const int K = static_cast<int>(p.K), V = static_cast<int>(p.V), Vw = CAKE_GDN_WIDTH(V);
    const Tile<kD> k{ptx::shared_address(s.k)}, q{ptx::shared_address(s.q)}, dv = q, d_o{ptx::shared_address(s.d_o)};

    const Rows q_rows = CAKE_GDN_ROWS_OF(p, q), k_rows = CAKE_GDN_ROWS_OF(p, k), o_rows = CAKE_GDN_ROWS_OF(p, d_o);
    copy_rows<kThreads, C>(q, rows_at<E>(q_rows, c, hk), q_rows.token, c.length, K);
    copy_rows<kThreads, C>(k, rows_at<E>(k_rows, c, hk), k_rows.token, c.length, K);
    ptx::commit_copies();
    copy_rows<kThreads, C>(d_o, rows_at<E>(o_rows, c, hv), o_rows.token, c.length, V);
    ptx::commit_copies();
    const Gates gates{s.cum, s.reset};
    load_gates(gates, p, c, hv);

    const int warp = warp_index(), m0 = 16 * warp;
    ptx::wait_copies<1>();
    __syncthreads();
    uint32_t scores[C / 16][4];
    {
        uint32_t left[kD / 16][4];
        load_operand<E>(left, k, m0);
#pragma unroll
        for (int block = 0; block < 4; block += 2) {  // two tiles at a time, the first one may lie before the diagonal
            if (block + 1 < warp) continue;
            float kq[4][4] = {};
            warp_gemm_registers<E, false>(kq, left, q, 16 * block);
            for_pairs(kq, m0, 16 * block, [&](int j, int i, float &a, float &b) {
                a = masked(a, gates.decay(i, j));
                b = masked(b, gates.decay(i + 1, j));
            });
            pack_operand<E, 2>(*reinterpret_cast<uint32_t (*)[2][4]>(&scores[block]), kq);
        }
    }
    ptx::wait_copies<0>();
    __syncthreads();
    float acc[kD / 8][4] = {};
    warp_gemm_registers<E, true>(acc, scores, d_o, 0, warp);
    for_pairs(acc, m0, 0, [&](int, int, float &a, float &b) {
        a *= p.scale;
        b *= p.scale;
    });
    stage_rows<E>(dv, acc, m0);  // q has been read by all
    store_own_rows(dv, m0, slice_at(static_cast<E *>(p.dv), p, c, head, Vw), p.heads * Vw, 1, c.length, Vw);
}

}  // namespace

void run_dv_local(const cake_gdn_dv_local_params &p, void *stream) {
    run_chunks("dv_local", p, sizeof(Smem), kThreads, stream, dv_local<ptx::bf16>, dv_local<ptx::fp16>);
}

}  // namespace cake_gdn::cuda
