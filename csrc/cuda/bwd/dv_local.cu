// dv_local: what the outputs of a chunk say about its own corrected values.
//
//     dv_j = scale sum_{i>=j} G_ij (q_i.k_j) do_i
//
// Tile map. One block of four warps a (chunk, value head). Warp w computes the rows i = 16 w.. of the gated scores
// P [64, 64], puts them in shared memory, and then the rows j = 16 w.. of P^T do [64, V], V padded to 128.
//
// Shared memory: q, k, do [64, 128], P [64, 64], 16-bit, swizzled (tile.cuh): 56 KB; gates 320 bytes.
//
// Summation order: over tokens i ascending from the diagonal tile on, 16 at a time inside the tensor core.
#include "cuda/chain.hpp"
#include "cuda/programs.hpp"
#include "cuda/tile/chunk.cuh"
#include "cuda/tile/transfer.cuh"

namespace cake_gdn::cuda {

namespace {

constexpr int kThreads = 128;

struct Smem {
    alignas(128) char q[Tile<kD>::bytes(C)], k[Tile<kD>::bytes(C)], d_o[Tile<kD>::bytes(C)], p[Tile<C>::bytes(C)];
    float cum[C];
    uint8_t reset[C];
};

template <class E>
__global__ void __launch_bounds__(kThreads) dv_local(const __grid_constant__ cake_gdn_dv_local_params p) {
    extern __shared__ __align__(128) char memory[];
    Smem &s = *reinterpret_cast<Smem *>(memory);
    const auto [head, hv, hk] = block_heads(p);
    const Chunk c = block_chunk(p);
    if (c.sequence < 0) return;
    const int K = static_cast<int>(p.K), V = static_cast<int>(p.V), Vw = CAKE_GDN_WIDTH(V);
    const Tile<kD> q{ptx::shared_address(s.q)}, k{ptx::shared_address(s.k)}, d_o{ptx::shared_address(s.d_o)};
    const Tile<C> scores{ptx::shared_address(s.p)};

    const Rows q_rows = CAKE_GDN_ROWS_OF(p, q), k_rows = CAKE_GDN_ROWS_OF(p, k), o_rows = CAKE_GDN_ROWS_OF(p, d_o);
    copy_rows<kThreads, C>(q, rows_at<E>(q_rows, c, hk), q_rows.token, c.length, K);
    copy_rows<kThreads, C>(k, rows_at<E>(k_rows, c, hk), k_rows.token, c.length, K);
    ptx::commit_copies();
    copy_rows<kThreads, C>(d_o, rows_at<E>(o_rows, c, hv), o_rows.token, c.length, V);
    ptx::commit_copies();
    const Gates gates{s.cum, s.reset};
    load_gates(gates, p, c, hv);

    const int m0 = threadIdx.x / 32 * 16;
    ptx::wait_copies<1>();
    __syncthreads();
    {
        float qk[1][8][4] = {};
        warp_gemm<E, false, false>(qk, q, m0, k, 0, 0, kD);
        for_pairs(qk[0], m0, 0, [&](int i, int j, float &a, float &b) {
            a = masked(a, gates.decay(i, j));
            b = masked(b, gates.decay(i, j + 1));
        });
        stage_rows<E>(scores, qk[0], m0);
    }
    ptx::wait_copies<0>();
    __syncthreads();
    float dv[1][16][4] = {};
    warp_gemm<E, true, true>(dv, scores, m0, d_o, 0, m0, C);
    for_pairs(dv[0], m0, 0, [&](int, int, float &a, float &b) {
        a *= p.scale;
        b *= p.scale;
    });
    stage_rows<E>(q, dv[0], m0);  // q has been read by all
    store_own_rows(q, m0, slice_at(static_cast<E *>(p.dv), p, c, head, Vw), p.heads * Vw, 1, c.length, Vw);
}

}  // namespace

void run_dv_local(const cake_gdn_dv_local_params &p, void *stream) {
    run_chunks("dv_local", p, sizeof(Smem), kThreads, stream, dv_local<ptx::bf16>, dv_local<ptx::fp16>);
}

}  // namespace cake_gdn::cuda
