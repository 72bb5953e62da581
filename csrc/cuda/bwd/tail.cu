// tail: dqkwg, wy_backward and finalize of a chunk in one program; the value heads of a key head are a cluster.
//
//     dr = A^T du                                      gradient of beta v; A^T dw = -A^T du h^T = -dr h^T is that of beta e k
//     Z_ij = scale G_ij (do_i.v_new_j) for j <= i,     X_ij = -G_ij (dr_i.v_new_j),  W_ij = beta_i X_ij,  P_ij = X_ij k_i.k_j
//                                                      for j < i
//     dv_i = beta_i dr_i
//     dq_i = scale e_i (h do_i) + sum_j Z_ij k_j
//     dk_i = d_i (dh v_new_i) - beta_i e_i (h dr_i) + sum_j (Z_ji q_j + (W_ij + W_ji) k_j)
//     dstep_i = dr_i.v_i - e_i k_i.(h dr_i) + sum_j P_ij
//     dcum: scale e_i q_i.(h do_i), -beta_i e_i k_i.(h dr_i) to i;  d_j k_j.(dh v_new_j) from j to the last token, j < last;
//           Z_ij q_i.k_j and beta_i P_ij from j to i, j < i;  e_last <h, dh> to the last token
//     dq, dk of the key head: the sum over its value heads in head order, in fp32, then through the normalisation,
//     dx = rstd (d - xn (xn.d)), rounded once
//
// h is the state before the chunk, dh the gradient of the state after it. dr is rounded to E as an operand, so are Z and
// W. dw itself is not needed: what dqkwg hands to wy_backward in memory is here one product of dr with h.
//
// Tile map. One block of eight warps a (chunk, value head), the group's blocks a cluster: warp w has the rows
// m0 = 16 (w % 4).. and of 128 columns the half w / 4, of the scores' 64 that of 32. Products that share an operand run
// as one: do and dr times v_new, q and k times k, do and dr times h, Z and W times k.
//
// Shared memory, 16-bit and swizzled (tile.cuh), 113 KB, so that two blocks share an SM:
//     left  [128, 128]: do; du, then dr.               At the end fp32 dq [64, 128].
//     keys  [128, 128]: q; k.
//     v_new [64, 128], then Z; W [128, 64].            At the end the sums of the rows and columns.
//     state [128, 128]: v, then dv; A. Then dh, then h. At the end fp32 dk [64, 128].
// v_new and state serve until the products with dh are done; until then Z and W wait in registers, and so does h, which
// is fetched behind those products, meets dh element by element, and then takes its place.
//
// Summation order: products over K, V or tokens ascending, 16 at a time inside the tensor core; dk: d dh v_new, then
// - beta e h dr, then W k, Z^T q, W^T k; dq: the state's part, then Z k. Row sums: a lane's columns ascending, its four
// lanes by a tree, the two halves. Column sums: a lane's two rows, its eight lanes by a tree, the warps ascending.
// <h, dh>: a thread's elements, its warp by a butterfly, the warps ascending. xn.d: a lane's four columns, its warp by a
// butterfly. Value heads ascending.
#include "cuda/chain.hpp"
#include "cuda/programs.hpp"
#include "cuda/ptx/cluster.cuh"
#include "cuda/tile/pairs.cuh"
#include "cuda/tile/pieces.cuh"
#include "cuda/tile/wy.cuh"

namespace cake_gdn::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kLine = 128;  // bytes of global memory that L2 keeps together

// Sums over a token's row that the gates' gradients are made of.
enum RowSum : int {
    kZ,          // of Z_ij q_i.k_j
    kP,          // of P_ij
    kValue,      // dr.v
    kToState,    // d k.(dh v_new)
    kFromState,  // scale e q.(h do)
    kDecayed,    // -e k.(h dr)
    kRowSums
};

struct Sums {
    float rows[kRowSums][2][C];  // by halves of the columns
    float columns[4][C];         // of what leaves token j for later ones, by warps
    float leaving[2];
};

struct Smem {
    alignas(256) char left[Tile<kD>::bytes(2 * C)], keys[Tile<kD>::bytes(2 * C)];
    alignas(256) char state[Tile<kD>::bytes(kD)];
    union {
        alignas(256) char v_new[Tile<kD>::bytes(C)];
        char scores[Tile<C>::bytes(2 * C)];
        Sums sums;
    };
    float cum[C], step[C], through[kWarps];
    uint8_t reset[C];
    Chunk chunk;  // read again where they are needed again: cheaper than registers, and than what would be kept of them
    Heads heads;
};

// A value head's part of dq or dk, fp32 [64, 128], in pieces of four columns. Swizzled so that neither the lanes that
// share accumulator rows nor those that read a row meet a bank twice.
struct Part {
    static constexpr int kRowBytes = kD * 4;
    uint32_t base;  // a multiple of 256

    __device__ static __forceinline__ uint32_t offset(int row, int column) {
        return row * kRowBytes + ((column / 4 ^ row % 4 * 2) << 4) + column % 4 * 4;
    }
    __device__ __forceinline__ void store(const float (&acc)[8][4], int row, int n0) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t first = base + offset(row + 8 * half, n0 + threadIdx.x % 4 * 2);
#pragma unroll
            for (int t = 0; t < 8; ++t) {
                ptx::store_shared(first ^ t << 5, make_float2(acc[t][2 * half], acc[t][2 * half + 1]));
            }
        }
    }
};

// dq or dk of the chunk and the key head.
template <class E>
struct Gradient {
    Part part;
    Tile<kD> x;
    const float *rstd;  // of the chunk's first row; null: no normalisation
    E *out;             // the chunk's first row; null: not wanted
    int64_t row_stride, column_stride;

    __device__ __forceinline__ void store(float4 d, float scale, int row, int columns) const {
        const int column = threadIdx.x % 32 * 4;
        if (rstd != nullptr) {
            const uint32_t at = x.pair(row, column);
            const float2 low = ptx::unpack<E>(ptx::load_shared_32(at)),
                         high = ptx::unpack<E>(ptx::load_shared_32(at + 4));
            float dot = fmaf(high.y, d.w, fmaf(high.x, d.z, fmaf(low.y, d.y, low.x * d.x)));
#pragma unroll
            for (int delta = 1; delta < 32; delta *= 2) dot += __shfl_xor_sync(0xffffffffu, dot, delta);
            d.x = scale * fmaf(-low.x, dot, d.x);
            d.y = scale * fmaf(-low.y, dot, d.y);
            d.z = scale * fmaf(-high.x, dot, d.z);
            d.w = scale * fmaf(-high.y, dot, d.w);
        }
        const uint2 bits = {ptx::pack<E>(d.x, d.y), ptx::pack<E>(d.z, d.w)};
        E *const to = out + row * row_stride + column * column_stride;
        if (column_stride == 1 && row_stride % 4 == 0 && columns % 4 == 0 &&
            reinterpret_cast<uintptr_t>(out) % 8 == 0) {
            if (column < columns) *reinterpret_cast<uint2 *>(to) = bits;
        } else {
            const E *from = reinterpret_cast<const E *>(&bits);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (column + e < columns) to[e * column_stride] = from[e];
            }
        }
    }
};

// Both gradients in the rows of this block, every group-th from its rank on: the parts of the cluster's blocks in head
// order, through the normalisation. A warp has up to four rows of each in flight.
template <class E>
__device__ __forceinline__ void finish(const Gradient<E> (&of)[2], int64_t rstd_stride, int rows, int columns, int rank,
                                       int group) {
    constexpr int kBatch = 4;
    const int column = threadIdx.x % 32 * 4;
#pragma unroll 1
    for (int first = rank + group * warp_index(); first < rows; first += group * kWarps * kBatch) {
        const auto row_of = [&](int i) { return first + group * kWarps * i; };
        float4 d[2][kBatch] = {};
        float scale[2][kBatch] = {};
#pragma unroll
        for (int x = 0; x < 2; ++x) {
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (of[x].rstd != nullptr && row_of(i) < rows)
                    scale[x][i] = __ldg(of[x].rstd + row_of(i) * rstd_stride);
            }
        }
#pragma unroll 1
        for (int member = 0; member < group; ++member) {
            float4 more[2][kBatch] = {};
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                if (of[x].out == nullptr) continue;  // no load may be under way unused when the cluster parts
                const uint32_t base = ptx::cluster_address(of[x].part.base, member);
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    if (row_of(i) < rows) more[x][i] = ptx::load_cluster_128(base + Part::offset(row_of(i), column));
                }
            }
#pragma unroll
            for (int x = 0; x < 2; ++x) {
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    d[x][i].x += more[x][i].x;
                    d[x][i].y += more[x][i].y;
                    d[x][i].z += more[x][i].z;
                    d[x][i].w += more[x][i].w;
                }
            }
        }
#pragma unroll
        for (int x = 0; x < 2; ++x) {
            if (of[x].out == nullptr) continue;
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (row_of(i) < rows) of[x].store(d[x][i], scale[x][i], row_of(i), columns);
            }
        }
    }
}

template <class E>
__global__ void __launch_bounds__(kThreads, 2) tail(const __grid_constant__ cake_gdn_tail_params p) {
    extern __shared__ __align__(256) char memory[];
    Smem &s = *reinterpret_cast<Smem *>(memory);
    const auto [head, hv, hk] = block_heads(p);
    const Chunk c = block_chunk(p);
    if (c.sequence < 0) return;  // the whole cluster: it has one chunk
    const int K = static_cast<int>(p.K), V = static_cast<int>(p.V), Vw = CAKE_GDN_WIDTH(V);
    const Tile<kD> left{ptx::shared_address(s.left)}, dr{left.piece(C, 0)},
        du = dr, keys{ptx::shared_address(s.keys)}, q = keys, k{keys.piece(C, 0)}, v_new{ptx::shared_address(s.v_new)},
        state{ptx::shared_address(s.state)}, v = state;
    const Tile<C> a{state.piece(C, 0)}, scores{ptx::shared_address(s.scores)};
    const int64_t v_stride = p.stored_heads * Vw;

    {
        const Rows q_rows = CAKE_GDN_ROWS_OF(p, q), k_rows = CAKE_GDN_ROWS_OF(p, k), v_rows = CAKE_GDN_ROWS_OF(p, v),
                   o_rows = CAKE_GDN_ROWS_OF(p, d_o);
        const E *const A = static_cast<const E *>(p.A) + (c.row * p.HV + hv) * C;
        copy_rows<kThreads, C>(a, A, p.HV * C, c.length, C);
        copy_rows<kThreads, C>(du, stored_at(static_cast<const E *>(p.du), p, c, hv, Vw), v_stride, c.length, V);
        copy_rows<kThreads, C>(v, rows_at<E>(v_rows, c, hv), v_rows.token, c.length, V);
        ptx::commit_copies();
        copy_rows<kThreads, C>(k, rows_at<E>(k_rows, c, hk), k_rows.token, c.length, K);
        copy_rows<kThreads, C>(q, rows_at<E>(q_rows, c, hk), q_rows.token, c.length, K);
        copy_rows<kThreads, C>(v_new, stored_at(static_cast<const E *>(p.v_new), p, c, hv, Vw), v_stride, c.length, V);
        copy_rows<kThreads, C>(left, rows_at<E>(o_rows, c, hv), o_rows.token, c.length, V);
        ptx::commit_copies();
    }
    // Both states come later, when there is room for them; they wait in L2.
    const auto prefetch_state = [&](const void *state) {
        for (int at = threadIdx.x * kLine; at < K * Vw * static_cast<int>(sizeof(E)); at += kThreads * kLine) {
            ptx::prefetch(static_cast<const char *>(state) + at);
        }
    };
    if (!c.last) {
        prefetch_state(
            state_at(static_cast<const E *>(p.dh), next_slot(c), p.stored_heads, hv - p.stored_begin, K, Vw));
    }
    if (!c.first) {
        prefetch_state(state_at(static_cast<const E *>(p.h), c.slot, p.h_heads, hv - p.h_begin, K, Vw));
    }
    const Gates gates{s.cum, s.reset};
    load_gates(gates, p, c, hv);
    load_scalars(s.step, p.step, p, c, hv);
    if (threadIdx.x == 0) s.chunk = c, s.heads = {head, hv, hk};

    const int warp = warp_index(), lane = threadIdx.x % 32, half = warp / 4, m0 = warp % 4 * 16, n0 = half * 64;
    const int row = m0 + lane / 4;  // and row + 8
    ptx::wait_copies<1>();
    __syncthreads();

    // dr, and with it dv in v's place, which only this warp has of these rows and columns.
    float value_sum;  // one of dr.v of both rows or, later, of what enters the state from them
    {
        float dots[4] = {};
        uint32_t pairs[8][2];
        float acc[1][8][4] = {};
        warp_gemm<E, true, true>(acc, a, m0, du, n0, m0, C);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float step = s.step[row + 8 * r];
            const PairRow v_pairs(v, row + 8 * r, n0);
            uint32_t bits[8];
            v_pairs.load(bits);
            dots[r] = lane_dot<E>(acc[0], r, bits);
#pragma unroll
            for (int t = 0; t < 8; ++t) {
                v_pairs.store(t, ptx::pack<E>(masked(acc[0][t][2 * r], step), masked(acc[0][t][2 * r + 1], step)));
                pairs[t][r] = ptx::pack<E>(acc[0][t][2 * r], acc[0][t][2 * r + 1]);
            }
        }
        value_sum = scatter_sums<2>(dots);
        if (p.dv != nullptr) {
            E *const out =
                static_cast<E *>(p.dv) + s.chunk.b * p.dv_batch + s.chunk.t * p.dv_token + s.heads.value * p.dv_head;
            store_own_part<64>(v, m0, n0, out, p.dv_token, p.dv_column, s.chunk.length, V);
        }
        __syncthreads();  // du and A have been read, dv has left
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const PairRow to(dr, row + 8 * r, n0);
#pragma unroll
            for (int t = 0; t < 8; ++t) to.store(t, pairs[t][r]);
        }
    }
    if (s.chunk.last) {
        load_user_state<E>(state, CAKE_GDN_STATE_OF(p, dht), s.chunk.sequence, s.heads.value, K, V, 0, kThreads);
    } else {
        const E *const dh = state_at(static_cast<const E *>(p.dh), next_slot(s.chunk), p.stored_heads,
                                     s.heads.value - p.stored_begin, K, Vw);
        copy_rows<kThreads, kD>(state, dh, Vw, K, V);
    }
    ptx::commit_copies();
    ptx::wait_copies<1>();
    __syncthreads();

    // The scores on and below the diagonal, Z and W, and their pairs' weights in the gate's gradient.
    uint32_t pairs[2][4][2] = {};
    float score_sum = 0.0f, column_sum = 0.0f;  // one of the lane's four rows or eight columns
    const int j0 = half * 32;
    if (j0 <= m0) {
        float qk[2][4][4] = {}, d[2][4][4] = {};
        warp_gemm<E, false, false, 1, C>(qk, keys, m0, k, j0, 0, kD);
        warp_gemm<E, false, false, 1, C>(d, left, m0, v_new, j0, 0, kD);
        float sums[4] = {}, leaving[8];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = row + 8 * r;
            const GateRow gate(gates, i, s.chunk.length);
            const float step = s.step[i];
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                const int j = j0 + 8 * t + 2 * (lane % 4);
                const float2 cum = *reinterpret_cast<const float2 *>(s.cum + j);
                float z[2], w[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int at = 2 * r + e;
                    const float below = gate.decay(j + e, e == 0 ? cum.x : cum.y);
                    z[e] = (j + e == i ? d[0][t][at] : masked(d[0][t][at], below)) * p.scale;
                    const float x = masked(-d[1][t][at], below), px = x * qk[1][t][at];
                    const float pz = j + e < i && z[e] != 0.0f ? z[e] * qk[0][t][at] : 0.0f;
                    w[e] = step * x;
                    sums[r] += pz;
                    sums[2 + r] += px;
                    const float leaves = fmaf(step, px, pz);
                    leaving[2 * t + e] = r == 0 ? leaves : leaving[2 * t + e] + leaves;
                }
                pairs[0][t][r] = ptx::pack<E>(z[0], z[1]);
                pairs[1][t][r] = ptx::pack<E>(w[0], w[1]);
            }
        }
        score_sum = scatter_sums<2>(sums);
        column_sum = scatter_sums<16>(leaving);
    }

    // With dh: dk's first part, and <h, dh>. h is on its way meanwhile.
    const StateView user = CAKE_GDN_STATE_OF(p, initial_state);
    ptx::wait_copies<0>();
    __syncthreads();
    const auto pass_through = [&](float share) {
#pragma unroll
        for (int delta = 16; delta > 0; delta /= 2) share += __shfl_xor_sync(0xffffffffu, share, delta);
        if (lane == 0) s.through[warp] = share;
    };
    if (s.chunk.first) pass_through(Pieces<kThreads>::product<E>(user, s.chunk.sequence, s.heads.value, K, V, state));
    Pieces<kThreads> h;
    h.load(state_at(static_cast<const E *>(p.h), s.chunk.slot, p.h_heads, s.heads.value - p.h_begin, K, Vw),
           !s.chunk.first, K, V);
    float entering[1][8][4] = {};
    warp_gemm<E, false, false, 1>(entering, v_new, m0, state, n0, 0, kD);
    if (!s.chunk.first) pass_through(h.product<E>(state));
    __syncthreads();  // dh and v_new have been read
#pragma unroll
    for (int x = 0; x < 2; ++x) {
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            scores.store_pair(x * C + row, j0 + 8 * t + 2 * (lane % 4), pairs[x][t][0]);
            scores.store_pair(x * C + row + 8, j0 + 8 * t + 2 * (lane % 4), pairs[x][t][1]);
        }
    }
    if (s.chunk.first) {
        load_user_state<E>(state, user, s.chunk.sequence, s.heads.value, K, V, 0, kThreads);
    } else {
        h.store(state);
    }
    float acc[2][8][4];  // dq, dk
    float dots[4] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float d = gates.to_end(row + 8 * r, s.chunk.length);
#pragma unroll
        for (int t = 0; t < 8; ++t) {
            acc[1][t][2 * r] = masked(entering[0][t][2 * r], d);
            acc[1][t][2 * r + 1] = masked(entering[0][t][2 * r + 1], d);
        }
        uint32_t bits[8];
        PairRow(k, row + 8 * r, n0).load(bits);
        dots[2 + r] = lane_dot<E>(acc[1], r, bits);
    }
    value_sum += scatter_sums<2>(dots);
    __syncthreads();

    // With h: dq's first part, and what reaches dk through w.
    float state_sum;
    {
        float x[2][8][4] = {}, sums[4];
        warp_gemm<E, false, false, 1, C>(x, left, m0, state, n0, 0, kD);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float start = gates.from_start(row + 8 * r), weight = masked(start, s.step[row + 8 * r]);
            uint32_t bits[8];
            PairRow(k, row + 8 * r, n0).load(bits);
            sums[2 + r] = masked(-lane_dot<E>(x[1], r, bits), start);
#pragma unroll
            for (int t = 0; t < 8; ++t) {
#pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; ++e) {
                    acc[0][t][e] = masked(x[0][t][e], start) * p.scale;
                    acc[1][t][e] -= masked(x[1][t][e], weight);
                }
            }
            PairRow(q, row + 8 * r, n0).load(bits);
            sums[r] = lane_dot<E>(acc[0], r, bits);
        }
        state_sum = scatter_sums<2>(sums);
    }

    // The scores' parts: of both from k, then dk's transposed ones.
    warp_gemm<E, false, true, 1, C>(acc, scores, m0, k, n0, 0, m0 + 16);
    {
        auto &dk = reinterpret_cast<float (&)[1][8][4]>(acc[1]);
        warp_gemm<E, true, true, 1>(dk, scores, m0, q, n0, m0, C);
        warp_gemm<E, true, true, 1>(dk, Tile<C>{scores.piece(C, 0)}, m0, k, n0, m0, C);
    }
    __syncthreads();  // all products are done

    const Part dq_part{left.base}, dk_part{state.base};
    dq_part.store(acc[0], row, n0);
    dk_part.store(acc[1], row, n0);
    {
        const int of = m0 + lane / 4 + lane % 2 * 8, second = lane % 4 / 2;
        s.sums.rows[kZ + second][half][of] = score_sum;
        s.sums.rows[kValue + second][half][of] = value_sum;
        s.sums.rows[kFromState + second][half][of] = state_sum;
        s.sums.columns[warp % 4][j0 + lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2] = column_sum;
    }
    __syncthreads();  // of the sums, which are this block's own; the parts are the cluster's
    ptx::arrive_cluster();
    ptx::wait_cluster();

    const int length = s.chunk.length;
    if (p.dq != nullptr || p.dk != nullptr) {
        const int group = static_cast<int>(p.HV / p.H);
        const auto gradient = [&](const Part &part, Tile<kD> x, const float *rstd, void *out, int64_t batch,
                                  int64_t token, int64_t head, int64_t column) {
            const int64_t first = s.chunk.b * batch + s.chunk.t * token + s.heads.key * head;
            return Gradient<E>{part,
                               x,
                               rstd == nullptr ? nullptr : rstd + s.chunk.row * p.H + s.heads.key,
                               out == nullptr ? nullptr : static_cast<E *>(out) + first,
                               token,
                               column};
        };
        finish<E>({gradient(dq_part, q, p.q_rstd, p.dq, p.dq_batch, p.dq_token, p.dq_head, p.dq_column),
                   gradient(dk_part, k, p.k_rstd, p.dk, p.dk_batch, p.dk_token, p.dk_head, p.dk_column)},
                  p.H, length, K, s.heads.local % group, group);
    }
    __syncwarp();
    ptx::arrive_cluster_relaxed();  // the other blocks' parts have been read

    // dstep and dcum: threads 0..63, one token each; the last token gathers what enters the state and what passes through.
    if (warp < 2) {
        const int i = threadIdx.x, last = length - 1;
        const auto row_sum = [&](RowSum of) { return s.sums.rows[of][0][i] + s.sums.rows[of][1][i]; };
        const float leaves = i < last ? row_sum(kToState) : 0.0f;
        float gathered = leaves;
#pragma unroll
        for (int delta = 16; delta > 0; delta /= 2) gathered += __shfl_xor_sync(0xffffffffu, gathered, delta);
        if (lane == 0) s.sums.leaving[warp] = gathered;
        ptx::barrier(1, 64);
        const float sum = row_sum(kDecayed) + row_sum(kP);
        float total = row_sum(kFromState) - leaves + row_sum(kZ);
        total += s.step[i] * sum -
                 (((s.sums.columns[0][i] + s.sums.columns[1][i]) + s.sums.columns[2][i]) + s.sums.columns[3][i]);
        if (i == last) {
            float whole = s.through[0];
#pragma unroll
            for (int w = 1; w < kWarps; ++w) whole += s.through[w];
            total += (s.sums.leaving[0] + s.sums.leaving[1]) + masked(whole, gates.from_start(last));
        }
        if (i < length) {
            const int64_t to = s.heads.value * (p.B * p.T) + s.chunk.row + i;
            p.dstep[to] = row_sum(kValue) + sum;
            p.dcum[to] = total;
        }
    }
    __syncwarp();
    ptx::wait_cluster();
}

}  // namespace

void run_tail(const cake_gdn_tail_params &p, void *stream) {
    check_chain("tail", p);
    const int64_t group = p.HV / p.H;
    if (group > CAKE_GDN_TAIL_GROUP || p.heads % group != 0 || p.head_begin % group != 0) {
        throw Error(CAKE_GDN_INVALID_ARGUMENT, "tail: the slice of heads must be whole groups of at most " +
                                                   std::to_string(CAKE_GDN_TAIL_GROUP) + " (" + chain_arguments(p) +
                                                   ")");
    }
    run_chunks("tail", p, sizeof(Smem), kThreads, stream, tail<ptx::bf16>, tail<ptx::fp16>, static_cast<int>(group));
}

}  // namespace cake_gdn::cuda
