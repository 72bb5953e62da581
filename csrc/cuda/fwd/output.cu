// output: the chunk's outputs from the state before it and from its own corrected values.
//
//     o_i = scale (e_i q_i h + sum_{j<=i} G_ij (q_i.k_j) v_new_j)
//
// Tile map. One block of four warps a (chunk, value head), value heads of a chunk next to each other so that q and k
// come from L2. Warp w has the rows 16 w.. of everything: its rows of q are the left operand of both products, its gated
// scores, up to the diagonal tile, become that of the third without leaving the registers. K and V are padded to 128 by
// zeros in shared memory; columns past V are not stored.
//
// Shared memory: q, then v_new; k, then o: [64, 128]; h [128, 128]; 16-bit, swizzled (tile.cuh): 64 KB, three blocks an
// SM, so that one loads while another one computes; gates 320 bytes.
//
// Summation order: q h over K ascending, 16 at a time inside the tensor core; scaled by e_i; then the scores' product
// over tokens ascending, into the same accumulators.
#include "cuda/chain.hpp"
#include "cuda/programs.hpp"
#include "cuda/tile/chunk.cuh"
#include "cuda/tile/transfer.cuh"
#include "cuda/tile/wy.cuh"

namespace cake_gdn::cuda {

namespace {

constexpr int kThreads = 128;

struct Smem {
    alignas(128) char q[Tile<kD>::bytes(C)];  // then v_new
    alignas(128) char k[Tile<kD>::bytes(C)];  // then o, a warp its own rows
    alignas(128) char h[Tile<kD>::bytes(kD)];
    float cum[C];
    uint8_t reset[C];
};

template <class E>
__global__ void __launch_bounds__(kThreads, 3) output(const __grid_constant__ cake_gdn_output_params p) {
    extern __shared__ __align__(128) char memory[];
    Smem &s = *reinterpret_cast<Smem *>(memory);
    const auto [head, hv, hk] = block_heads(p);
    const Chunk c = block_chunk(p);
    if (c.sequence < 0) return;
    const int K = static_cast<int>(p.K), V = static_cast<int>(p.V), Vw = CAKE_GDN_WIDTH(V);
    const Tile<kD> q{ptx::shared_address(s.q)}, v = q, k{ptx::shared_address(s.k)}, o = k, h{ptx::shared_address(s.h)};

    const Rows q_rows = CAKE_GDN_ROWS_OF(p, q), k_rows = CAKE_GDN_ROWS_OF(p, k);
    copy_rows<kThreads, C>(q, rows_at<E>(q_rows, c, hk), q_rows.token, c.length, K);
    copy_rows<kThreads, C>(k, rows_at<E>(k_rows, c, hk), k_rows.token, c.length, K);
    ptx::commit_copies();
    const StateView initial = CAKE_GDN_STATE_OF(p, initial_state);
    if (c.first) {
        load_user_state<E>(h, initial, c.sequence, hv, K, V, 0, kThreads);
    } else {
        copy_rows<kThreads, kD>(h, state_at(static_cast<const E *>(p.h), c.slot, p.h_heads, hv - p.h_begin, K, Vw), Vw,
                                K, V);
    }
    ptx::commit_copies();
    const Gates gates{s.cum, s.reset};
    load_gates(gates, p, c, hv);

    const int warp = warp_index(), m0 = 16 * warp;
    ptx::wait_copies<1>();
    __syncthreads();
    uint32_t left[kD / 16][4];
    load_operand<E>(left, q, m0);
    __syncthreads();
    copy_rows<kThreads, C>(v, slice_at(static_cast<const E *>(p.v_new), p, c, head, Vw), p.heads * Vw, c.length, V);
    ptx::commit_copies();

    uint32_t scores[C / 16][4];
#pragma unroll
    for (int block = 0; block < 4; block += 2) {  // two tiles at a time, the second one may lie past the diagonal
        if (block > warp) break;
        float qk[4][4] = {};
        warp_gemm_registers<E, false>(qk, left, k, 16 * block);
        for_pairs(qk, m0, 16 * block, [&](int i, int j, float &a, float &b) {
            a = masked(a, gates.decay(i, j));
            b = masked(b, gates.decay(i, j + 1));
        });
        pack_operand<E, 2>(*reinterpret_cast<uint32_t (*)[2][4]>(&scores[block]), qk);
    }
    ptx::wait_copies<1>();
    __syncthreads();
    float acc[kD / 8][4] = {};
    warp_gemm_registers<E, true>(acc, left, h, 0);
    for_pairs(acc, m0, 0, [&](int i, int, float &a, float &b) {
        const float e = gates.from_start(i);
        a = masked(a, e);
        b = masked(b, e);
    });
    ptx::wait_copies<0>();
    __syncthreads();
    warp_gemm_registers<E, true>(acc, scores, v, 0, 0, warp + 1);
    for_pairs(acc, m0, 0, [&](int, int, float &a, float &b) {
        a *= p.scale;
        b *= p.scale;
    });
    stage_rows<E>(o, acc, m0);  // k has been read by all
    E *out = static_cast<E *>(p.o) + c.b * p.o_batch + c.t * p.o_token + hv * p.o_head;
    store_own_rows(o, m0, out, p.o_token, p.o_column, c.length, V);
}

}  // namespace

void run_output(const cake_gdn_output_params &p, void *stream) {
    run_chunks("output", p, sizeof(Smem), kThreads, stream, output<ptx::bf16>, output<ptx::fp16>);
}

}  // namespace cake_gdn::cuda
