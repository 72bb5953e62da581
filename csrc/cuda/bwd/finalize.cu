// finalize: the gradient of q or k of each key head, from the parts of its value heads.
//
//     d[r, :]  = parts[r, 0, :] + parts[r, 1, :] + ... + parts[r, group - 1, :]     in fp32, in head order
//     dx[r, :] = d, or with x (rows xn = x0 rstd, as pack normalised them)
//     dx[r, :] = rstd[r] (d - xn (xn . d))                                          rounded once
//
// for the rows r = (b, t, h) of the slice's key heads.
//
// Work map (tile/rows.cuh). 16 bytes of a row a lane, as in pack. A row's parts are contiguous; two rows of a thread
// are in flight, and two value heads of each. Memory bound: 2 W (group + 1) bytes a row, 2 W more and 4 with x.
//
// Shared memory: none. Summation order: value heads ascending; xn . d over a lane's eight columns ascending, then a
// tree over the lanes, neighbours first.
#include <string>

#include "cuda/launch.hpp"
#include "cuda/programs.hpp"
#include "cuda/tile/rows.cuh"

namespace cake_gdn::cuda {

namespace {

constexpr int kBatch = 2;
static_assert(kPasses % kBatch == 0, "a block's passes are whole batches");

template <class E, int Vector>
__global__ void __launch_bounds__(kRowThreads, 4)
    finalize(const __grid_constant__ cake_gdn_finalize_params p, const __grid_constant__ RowTiles tiles) {
    RowCursor at(tiles, {p.dx_batch, p.dx_token, p.dx_head});
    const int piece = threadIdx.x & ((1 << tiles.shift) - 1), columns = static_cast<int>(p.K);
    const int group = static_cast<int>(p.group);
    const int64_t x_gap = p.x_heads - p.H;  // rows of x between the last head of a token and the first of the next
    const uint4 *parts = static_cast<const uint4 *>(p.parts) + piece, *x = static_cast<const uint4 *>(p.x) + piece;
    uint16_t *dx = static_cast<uint16_t *>(p.dx);
    const bool through = p.x != nullptr;
#pragma unroll 1
    for (int pass = 0; pass < kPasses; pass += kBatch) {
        bool exists[kBatch];
        int64_t from[kBatch], to[kBatch];
        uint4 normalised[kBatch];
        float rstd[kBatch], d[kBatch][8] = {};
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            exists[i] = at.exists() && piece < tiles.pieces;
            from[i] = at.row * group * tiles.pieces;
            to[i] = at.offset;
            normalised[i] = {0, 0, 0, 0};
            rstd[i] = 0.0f;
            if (exists[i] && through) {
                const int64_t row = at.row + at.token * x_gap;
                normalised[i] = __ldg(x + row * tiles.pieces);
                rstd[i] = __ldg(p.rstd + row);
            }
            at.next();
        }
#pragma unroll 2
        for (int part = 0; part < group; ++part) {
            uint4 bits[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                bits[i] = {0, 0, 0, 0};
                if (exists[i]) bits[i] = __ldcs(parts + from[i]);
                from[i] += tiles.pieces;
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                float value[8];
                unpack_piece<E>(value, bits[i]);
#pragma unroll
                for (int c = 0; c < 8; ++c) d[i][c] += value[c];
            }
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (through) {
                float xn[8], dot = 0.0f;
                unpack_piece<E>(xn, normalised[i]);
#pragma unroll
                for (int c = 0; c < 8; ++c) dot = fmaf(xn[c], d[i][c], dot);
                dot = sum_row(dot, tiles.shift);
#pragma unroll
                for (int c = 0; c < 8; ++c) d[i][c] = rstd[i] * fmaf(-xn[c], dot, d[i][c]);
            }
            if (exists[i]) store_piece<Vector>(dx + to[i], piece * 8, columns, p.dx_column, pack_piece<E>(d[i]));
        }
    }
}

std::string arguments(const cake_gdn_finalize_params &p) {
    const auto text = [](int64_t value) { return std::to_string(value); };
    return "B=" + text(p.B) + ", T=" + text(p.T) + ", H=" + text(p.H) + ", group=" + text(p.group) +
           ", K=" + text(p.K) + ", dtype " + text(p.dtype);
}

template <int Vector>
void launch_finalize(const cake_gdn_finalize_params &p, const RowTiles &tiles, void *stream) {
    const DeviceGuard guard(p.device);
    launch(Site{"finalize", [&] { return arguments(p); }}, traits(p.device), {tiles.blocks(), kRowThreads}, stream,
           p.dtype == CAKE_GDN_BF16 ? finalize<ptx::bf16, Vector> : finalize<ptx::fp16, Vector>,
           cake_gdn_finalize_params(p), RowTiles(tiles));
}

}  // namespace

void run_finalize(const cake_gdn_finalize_params &p, void *stream) {
    const auto reject = [&](const char *what) {
        throw Error(CAKE_GDN_INVALID_ARGUMENT, std::string("finalize: ") + what + " (" + arguments(p) + ")");
    };
    if (p.dtype != CAKE_GDN_BF16 && p.dtype != CAKE_GDN_FP16) reject("dtype must be bf16 or fp16");
    if (const char *fault = rows_fault(p.B, p.T, p.H, p.K)) reject(fault);
    if (p.group < 1 || p.group > (1 << 20)) reject("group out of range");
    const RowTiles tiles = row_tiles(p.B, p.T, p.H, p.K);
    if (tiles.rows > 0 && (!p.parts || !p.dx)) reject("parts and dx must not be null");
    if (p.x && (p.x_heads < p.H || (tiles.rows > 0 && !p.rstd))) reject("x needs rstd and x_heads of at least H");
    if (reinterpret_cast<uintptr_t>(p.parts) % 16 || reinterpret_cast<uintptr_t>(p.x) % 16) {
        reject("parts and x must be aligned to 16 bytes");
    }
    require_code("finalize", traits(p.device));
    if (tiles.rows == 0) return;
    switch (row_vector(p.dx, p.B, p.T, p.H, p.K, p.dx_batch, p.dx_token, p.dx_head, p.dx_column)) {
        case 8: launch_finalize<8>(p, tiles, stream); break;
        case 4: launch_finalize<4>(p, tiles, stream); break;
        default: launch_finalize<1>(p, tiles, stream); break;
    }
}

}  // namespace cake_gdn::cuda
