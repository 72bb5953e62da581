// output: the chunk's outputs from the state before it and from its own corrected values.
//
//     o_i = scale (e_i q_i h + sum_{j<=i} G_ij (q_i.k_j) v_new_j)
//
// Tile map. One block of eight warps a (chunk, value head), value heads of a chunk next to each other so that q and k
// come from L2. Warp w has the rows 16 (w % 4).. and the half w / 4 of the columns: 32 of the scores' 64, which go to
// shared memory, then 64 of o's 128. K and V are padded to 128 by zeros in shared memory; columns past V are not stored.
//
// Shared memory: q, k, v_new [64, 128], h [128, 128], the gated scores [64, 64], 16-bit, swizzled (tile.cuh): 88 KB, two
// blocks an SM; gates 320 bytes.
//
// Summation order: q h over K ascending, 16 at a time inside the tensor core; scaled by e_i; then the scores' product
// over tokens ascending, into the same accumulators.
#include "cuda/chain.hpp"
#include "cuda/programs.hpp"
#include "cuda/tile/chunk.cuh"
#include "cuda/tile/transfer.cuh"

namespace cake_gdn::cuda {

namespace {

constexpr int kThreads = 256;

struct Smem {
    alignas(128) char q[Tile<kD>::bytes(C)], k[Tile<kD>::bytes(C)], v[Tile<kD>::bytes(C)], h[Tile<kD>::bytes(kD)];
    char scores[Tile<C>::bytes(C)];
    float cum[C];
    uint8_t reset[C];
};

template <class E>
__global__ void __launch_bounds__(kThreads, 2) output(const __grid_constant__ cake_gdn_output_params p) {
    extern __shared__ __align__(128) char memory[];
    Smem &s = *reinterpret_cast<Smem *>(memory);
    const auto [head, hv, hk] = block_heads(p);
    const Chunk c = block_chunk(p);
    if (c.sequence < 0) return;
    const int K = static_cast<int>(p.K), V = static_cast<int>(p.V), Vw = CAKE_GDN_WIDTH(V);
    const Tile<kD> q{ptx::shared_address(s.q)}, k{ptx::shared_address(s.k)}, v{ptx::shared_address(s.v)},
        h{ptx::shared_address(s.h)};
    const Tile<C> scores{ptx::shared_address(s.scores)};

    const Rows q_rows = CAKE_GDN_ROWS_OF(p, q), k_rows = CAKE_GDN_ROWS_OF(p, k);
    copy_rows<kThreads, C>(q, rows_at<E>(q_rows, c, hk), q_rows.token, c.length, K);
    copy_rows<kThreads, C>(k, rows_at<E>(k_rows, c, hk), k_rows.token, c.length, K);
    ptx::commit_copies();
    const StateView initial = CAKE_GDN_STATE_OF(p, initial_state);
    if (c.first) {
        load_user_state<E>(h, initial, c.sequence, hv, K, V, 0, kThreads);
    } else {
        const E *from = static_cast<const E *>(p.h) + (c.slot * p.h_heads + hv - p.h_begin) * p.K * Vw;
        copy_rows<kThreads, kD>(h, from, Vw, K, V);
    }
    copy_rows<kThreads, C>(v, slice_at(static_cast<const E *>(p.v_new), p, c, head, Vw), p.heads * Vw, c.length, V);
    ptx::commit_copies();
    const Gates gates{s.cum, s.reset};
    load_gates(gates, p, c, hv);

    const int warp = threadIdx.x / 32, m0 = warp % 4 * 16, half = warp / 4, n0 = 64 * half;
    ptx::wait_copies<1>();
    __syncthreads();
    {
        float qk[1][4][4] = {};
        warp_gemm<E, false, false>(qk, q, m0, k, 32 * half, 0, kD);
        for_pairs(qk[0], m0, 32 * half, [&](int i, int j, float &a, float &b) {
            a = masked(a, gates.decay(i, j));
            b = masked(b, gates.decay(i, j + 1));
        });
        stage_rows<E>(scores, qk[0], m0, 32 * half);
    }
    ptx::wait_copies<0>();
    __syncthreads();
    float o[1][8][4] = {};
    warp_gemm<E, false, true>(o, q, m0, h, n0, 0, kD);
    for_pairs(o[0], m0, n0, [&](int i, int, float &a, float &b) {
        const float e = gates.from_start(i);
        a = masked(a, e);
        b = masked(b, e);
    });
    warp_gemm<E, false, true>(o, scores, m0, v, n0, 0, m0 + 16);
    for_pairs(o[0], m0, n0, [&](int, int, float &a, float &b) {
        a *= p.scale;
        b *= p.scale;
    });
    stage_rows<E>(k, o[0], m0, n0);  // k has been read by all
    E *out = static_cast<E *>(p.o) + c.b * p.o_batch + c.t * p.o_token + hv * p.o_head;
    store_part<64>(k, m0, n0, out, p.o_token, p.o_column, c.length, V);
}

}  // namespace

void run_output(const cake_gdn_output_params &p, void *stream) {
    run_chunks("output", p, sizeof(Smem), kThreads, stream, output<ptx::bf16>, output<ptx::fp16>);
}

}  // namespace cake_gdn::cuda
