// pack: rows of any stride -> contiguous rows, normalised on the way when asked for.
//
//     out[r, :] = x[r, :]                       exactly, or
//     rstd[r] = (sum_c x[r, c]^2 + 1e-6)^-1/2,  out[r, c] = x[r, c] rstd[r]    in fp32, rounded once
//
// for the rows r = (b, t, head) of x [B, T, heads, columns]; columns from there to the width of out are zero.
//
// Work map (tile/rows.cuh). 16 bytes of a row a lane: 16 lanes a row of 128 elements, so that a warp stores 512
// contiguous bytes. kPasses rows a thread, kBatch loads of them in flight: at 64 registers a thread an SM has 1024
// threads and 64 KB under way, three times what its share of 4.3 TB/s needs. Memory bound: 2 W bytes in, 2 W out a row.
// Rows that are aligned to 16 or 8 bytes are read in words of that size, others element by element.
//
// Shared memory: none. Summation order: a lane's eight squares ascending, then a tree over the lanes, neighbours first.
#include <string>

#include "cuda/launch.hpp"
#include "cuda/programs.hpp"
#include "cuda/tile/rows.cuh"

namespace cake_gdn::cuda {

namespace {

constexpr int kBatch = 4;
constexpr float kNormEpsilon = 1e-6f;
static_assert(kPasses % kBatch == 0, "a block's passes are whole batches");

template <class E, int Vector>
__global__ void __launch_bounds__(kRowThreads)
    pack(const __grid_constant__ cake_gdn_pack_params p, const __grid_constant__ RowTiles tiles) {
    RowCursor at(tiles, {p.x_batch, p.x_token, p.x_head});
    const int piece = threadIdx.x & ((1 << tiles.shift) - 1), columns = static_cast<int>(p.columns);
    const uint16_t *x = static_cast<const uint16_t *>(p.x);
    uint4 *out = static_cast<uint4 *>(p.out) + at.row * tiles.pieces + piece;
    float *rstd_out = p.rstd + at.row;
    const int step = tiles.rows_of_pass();
#pragma unroll 1
    for (int pass = 0; pass < kPasses; pass += kBatch) {
        uint4 bits[kBatch];
        bool exists[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            exists[i] = at.exists();
            bits[i] = {0, 0, 0, 0};
            if (exists[i]) bits[i] = load_piece<Vector>(x + at.offset, piece * 8, columns, p.x_column);
            at.next();
        }
        if (p.normalise) {
            float rstd[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                float value[8], sum = 0.0f;
                unpack_piece<E>(value, bits[i]);
#pragma unroll
                for (int c = 0; c < 8; ++c) sum = fmaf(value[c], value[c], sum);
                rstd[i] = rsqrtf(sum_row(sum, tiles.shift) + kNormEpsilon);
#pragma unroll
                for (int c = 0; c < 8; ++c) value[c] *= rstd[i];
                bits[i] = pack_piece<E>(value);
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                if (p.rstd != nullptr && piece == 0 && exists[i]) rstd_out[i * step] = rstd[i];
            }
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (piece < tiles.pieces && exists[i]) out[i * step * tiles.pieces] = bits[i];
        }
        out += kBatch * step * tiles.pieces;
        rstd_out += kBatch * step;
    }
}

std::string arguments(const cake_gdn_pack_params &p) {
    const auto text = [](int64_t value) { return std::to_string(value); };
    return "B=" + text(p.B) + ", T=" + text(p.T) + ", heads=" + text(p.heads) + ", columns=" + text(p.columns) +
           ", dtype " + text(p.dtype) + (p.normalise ? ", normalise" : "");
}

template <int Vector>
void launch_pack(const cake_gdn_pack_params &p, const RowTiles &tiles, void *stream) {
    const DeviceGuard guard(p.device);
    launch(Site{"pack", [&] { return arguments(p); }}, traits(p.device), {tiles.blocks(), kRowThreads}, stream,
           p.dtype == CAKE_GDN_BF16 ? pack<ptx::bf16, Vector> : pack<ptx::fp16, Vector>, cake_gdn_pack_params(p),
           RowTiles(tiles));
}

}  // namespace

void run_pack(const cake_gdn_pack_params &p, void *stream) {
    const auto reject = [&](const char *what) {
        throw Error(CAKE_GDN_INVALID_ARGUMENT, std::string("pack: ") + what + " (" + arguments(p) + ")");
    };
    if (p.dtype != CAKE_GDN_BF16 && p.dtype != CAKE_GDN_FP16) reject("dtype must be bf16 or fp16");
    if (const char *fault = rows_fault(p.B, p.T, p.heads, p.columns)) reject(fault);
    const RowTiles tiles = row_tiles(p.B, p.T, p.heads, p.columns);
    if (tiles.rows > 0 && (!p.x || !p.out)) reject("x and out must not be null");
    if (reinterpret_cast<uintptr_t>(p.out) % 16) reject("out must be aligned to 16 bytes");
    require_code("pack", traits(p.device));
    if (tiles.rows == 0) return;
    switch (row_vector(p.x, p.B, p.T, p.heads, p.columns, p.x_batch, p.x_token, p.x_head, p.x_column)) {
        case 8: launch_pack<8>(p, tiles, stream); break;
        case 4: launch_pack<4>(p, tiles, stream); break;
        default: launch_pack<1>(p, tiles, stream); break;
    }
}

}  // namespace cake_gdn::cuda
