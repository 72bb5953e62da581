// dqkwg: what reaches q, k and w of a chunk through its outputs and its two states, and the gate's share of it.
//
//     Z_ij = scale G_ij (do_i.v_new_j) for j <= i
//     dq_i = scale e_i (h do_i) + sum_j Z_ij k_j
//     dk_j = d_j (dh v_new_j) + sum_i Z_ij q_i          (the state's and the scores' part; wy_backward adds the rest)
//     dw_i = -h du_i
//     dcum: x_i = scale e_i q_i.(h do_i) to i;  y_j = d_j k_j.(dh v_new_j) from j to the last token, j < last;
//           Z_ij q_i.k_j from j to i, j < i;  e_last <h, dh> to the last token
// with h the state before the chunk and dh the gradient of the state after it. The terms j = i and j = last cancel and
// are left out.
//
// Tile map. One block of eight warps a (chunk, value head): warp w has the rows 16 (w % 4).. and, of K columns, the half
// w / 4 (64 of 128), of the scores' 64 columns the half of 32.
//
// Shared memory, 16-bit and swizzled (tile.cuh): do, v_new, k [64, 128]; one buffer [64, 128] for du, then q; one
// [128, 128] for h, then dh, which waits in registers while h is read; Z [64, 64]: 104 KB, so that two blocks share an
// SM and one computes while the other loads.
//
// Summation order: products over V or tokens ascending, 16 at a time inside the tensor core. Row sums: a thread's columns
// ascending, then the four lanes of the row by a butterfly, then the two halves. Column sums: a thread's two rows, the
// eight lanes of the column by a butterfly, then the four warps ascending. <h, dh>: a thread's elements, the 32 lanes by
// a butterfly, then the eight warps ascending.
#include "cuda/chain.hpp"
#include "cuda/programs.hpp"
#include "cuda/tile/pieces.cuh"

namespace cake_gdn::cuda {

namespace {

constexpr int kThreads = 256;

struct Smem {
    alignas(128) char d_o[Tile<kD>::bytes(C)], v[Tile<kD>::bytes(C)], k[Tile<kD>::bytes(C)];
    char duq[Tile<kD>::bytes(C)], state[Tile<kD>::bytes(kD)], z[Tile<C>::bytes(C)];
    float cum[C];
    float from_state[2][C], to_state[2][C], rows[2][C], columns[4][C];  // partial sums: halves, warps
    float through[8], leaving[2];
    uint8_t reset[C];
};

// Sum over the elements of row `row` that this warp's accumulators and the tile's same columns share, in `to[row]`.
template <class E, int NT>
__device__ __forceinline__ void row_products(float *to, float (&acc)[NT][4], Tile<kD> tile, int m0, int n0) {
    const int row = m0 + threadIdx.x % 32 / 4, column = n0 + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < NT; ++j) {
            const float2 x = ptx::unpack<E>(tile.load_pair(row + 8 * r, column + 8 * j));
            sum += acc[j][2 * r] * x.x + acc[j][2 * r + 1] * x.y;
        }
        sum = sum_row_lanes(sum);
        if (threadIdx.x % 4 == 0) to[row + 8 * r] = sum;
    }
}

template <class E>
__global__ void __launch_bounds__(kThreads, 2) dqkwg(const __grid_constant__ cake_gdn_dqkwg_params p) {
    extern __shared__ __align__(128) char memory[];
    Smem &s = *reinterpret_cast<Smem *>(memory);
    const auto [head, hv, hk] = block_heads(p);
    const Chunk c = block_chunk(p);
    if (c.sequence < 0) return;
    const int K = static_cast<int>(p.K), V = static_cast<int>(p.V);
    const int Kw = CAKE_GDN_WIDTH(K), Vw = CAKE_GDN_WIDTH(V);
    const Tile<kD> d_o{ptx::shared_address(s.d_o)}, v{ptx::shared_address(s.v)}, k{ptx::shared_address(s.k)},
        duq{ptx::shared_address(s.duq)}, state{ptx::shared_address(s.state)};
    const Tile<C> z{ptx::shared_address(s.z)};
    const Rows q_rows = CAKE_GDN_ROWS_OF(p, q), k_rows = CAKE_GDN_ROWS_OF(p, k), o_rows = CAKE_GDN_ROWS_OF(p, d_o);

    copy_rows<kThreads, C>(d_o, rows_at<E>(o_rows, c, hv), o_rows.token, c.length, V);
    if (c.first) {
        load_user_state<E>(state, CAKE_GDN_STATE_OF(p, initial_state), c.sequence, hv, K, V, 0, kThreads);
    } else {
        copy_rows<kThreads, kD>(state, state_at(static_cast<const E *>(p.h), c.slot, p.h_heads, hv - p.h_begin, K, Vw),
                                Vw, K, V);
    }
    copy_rows<kThreads, C>(duq, stored_at(static_cast<const E *>(p.du), p, c, hv, Vw), p.stored_heads * Vw, c.length,
                           V);
    ptx::commit_copies();
    copy_rows<kThreads, C>(v, stored_at(static_cast<const E *>(p.v_new), p, c, hv, Vw), p.stored_heads * Vw, c.length,
                           V);
    copy_rows<kThreads, C>(k, rows_at<E>(k_rows, c, hk), k_rows.token, c.length, K);
    ptx::commit_copies();
    const Gates gates{s.cum, s.reset};
    load_gates(gates, p, c, hv);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = warp / 4;
    const int m0 = warp % 4 * 16, n0 = half * 64;
    Pieces<kThreads> dh;  // on their way behind the products with h
    dh.load(state_at(static_cast<const E *>(p.dh), next_slot(c), p.stored_heads, hv - p.stored_begin, K, Vw), !c.last,
            K, V);
    ptx::wait_copies<1>();
    __syncthreads();

    // With h: dw, which takes the place of du in the rows that only this warp and its other half read; dq's first part.
    {
        float dw[1][8][4] = {};
        warp_gemm<E, false, false, 1>(dw, duq, m0, state, n0, 0, kD);
        for_pairs(dw[0], m0, n0, [&](int, int, float &a, float &b) {
            a = -a;
            b = -b;
        });
        ptx::barrier(1 + warp % 4, 64);
        stage_rows<E>(duq, dw[0], m0, n0);
        store_part<64>(duq, m0, n0, slice_at(static_cast<E *>(p.dw), p, c, head, Kw), p.heads * Kw, 1, c.length, Kw);
    }
    float dq[1][8][4] = {};
    warp_gemm<E, false, false, 1>(dq, d_o, m0, state, n0, 0, kD);
    for_pairs(dq[0], m0, n0, [&](int i, int, float &a, float &b) {
        const float e = gates.from_start(i);
        a = masked(a, e) * p.scale;
        b = masked(b, e) * p.scale;
    });
    float through = dh.product<E>(state);  // <h, dh>
    const StateView dht = CAKE_GDN_STATE_OF(p, dht);
    if (c.last) through = dh.product<E>(dht, c.sequence, hv, K, V, state);
    __syncthreads();  // h and du have been read, dw has left

    copy_rows<kThreads, C>(duq, rows_at<E>(q_rows, c, hk), q_rows.token, c.length, K);
    ptx::commit_copies();
    if (c.last) {
        load_user_state<E>(state, dht, c.sequence, hv, K, V, 0, kThreads);
    } else {
        dh.store(state);
    }
    ptx::wait_copies<0>();
    __syncthreads();
#pragma unroll
    for (int delta = 16; delta > 0; delta /= 2) through += __shfl_xor_sync(0xffffffffu, through, delta);
    if (lane == 0) s.through[warp] = through;
    row_products<E>(s.from_state[half], dq[0], duq, m0, n0);

    // The scores: Z, and its pairs' weights in the gate's gradient.
    {
        float qk[1][4][4] = {}, dp[1][4][4] = {};
        const int j0 = half * 32;
        warp_gemm<E, false, false>(qk, duq, m0, k, j0, 0, kD);
        warp_gemm<E, false, false>(dp, d_o, m0, v, j0, 0, kD);
        float row_sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            float column_sum[2];
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const int i = m0 + lane / 4 + 8 * (x / 2), j = j0 + 8 * t + 2 * (lane % 4) + x % 2;
                const float value = masked(dp[0][t][x], gates.decay(i, j)) * p.scale;
                dp[0][t][x] = value;
                const float pair = j < i && value != 0.0f ? value * qk[0][t][x] : 0.0f;
                row_sum[x / 2] += pair;
                column_sum[x % 2] = x < 2 ? pair : column_sum[x % 2] + pair;
            }
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                float sum = column_sum[x];
#pragma unroll
                for (int delta = 4; delta < 32; delta *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, delta);
                if (lane < 4) s.columns[warp % 4][j0 + 8 * t + 2 * lane + x] = sum;
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float total = sum_row_lanes(row_sum[r]);
            if (lane % 4 == 0) s.rows[half][m0 + 8 * r + lane / 4] = total;
        }
        stage_rows<E>(z, dp[0], m0, j0);
    }
    __syncthreads();

    // With dh: dk's first part; then the scores' parts of both.
    float dk[1][8][4] = {};
    warp_gemm<E, false, false>(dk, v, m0, state, n0, 0, kD);
    for_pairs(dk[0], m0, n0, [&](int j, int, float &a, float &b) {
        const float d = gates.to_end(j, c.length);
        a = masked(a, d);
        b = masked(b, d);
    });
    row_products<E>(s.to_state[half], dk[0], k, m0, n0);
    warp_gemm<E, true, true>(dk, z, m0, duq, n0, m0, C);
    warp_gemm<E, false, true>(dq, z, m0, k, n0, 0, m0 + 16);
    __syncthreads();  // k, q and the partial sums are complete and read

    // dcum: threads 0..63, one token each; the last token gathers what leaves the others and what passes through.
    if (warp < 2) {
        const int i = threadIdx.x, last = c.length - 1;
        const float leaves = i < last ? s.to_state[0][i] + s.to_state[1][i] : 0.0f;
        float gathered = leaves;
#pragma unroll
        for (int delta = 16; delta > 0; delta /= 2) gathered += __shfl_xor_sync(0xffffffffu, gathered, delta);
        if (lane == 0) s.leaving[warp] = gathered;
        ptx::barrier(5, 64);
        float total = s.from_state[0][i] + s.from_state[1][i] - leaves + (s.rows[0][i] + s.rows[1][i]);
        total -= ((s.columns[0][i] + s.columns[1][i]) + s.columns[2][i]) + s.columns[3][i];
        if (i == last) {
            float whole = s.through[0];
#pragma unroll
            for (int w = 1; w < 8; ++w) whole += s.through[w];
            total += (s.leaving[0] + s.leaving[1]) + masked(whole, gates.from_start(last));
        }
        if (i < c.length) p.dcum[hv * (p.B * p.T) + c.row + i] = total;
    }
    stage_rows<E>(k, dk[0], m0, n0);
    store_part<64>(k, m0, n0, slice_at(static_cast<E *>(p.dk), p, c, head, Kw), p.heads * Kw, 1, c.length, Kw);
    stage_rows<E>(duq, dq[0], m0, n0);
    store_part<64>(duq, m0, n0, slice_at(static_cast<E *>(p.dq), p, c, head, Kw), p.heads * Kw, 1, c.length, Kw);
}

}  // namespace

void run_dqkwg(const cake_gdn_dqkwg_params &p, void *stream) {
    run_chunks("dqkwg", p, sizeof(Smem), kThreads, stream, dqkwg<ptx::bf16>, dqkwg<ptx::fp16>);
}

}  // namespace cake_gdn::cuda
