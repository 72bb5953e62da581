// Streaming over the rows of [B, T, heads, columns] tensors of 16-bit elements, 16 bytes of a row a lane.
//
// Row r of the flattened [B * T, heads] rows belongs to token r / heads. A row has W / 8 pieces and takes 2^shift lanes
// of a warp, the least that suffice; its sums are shuffles among those lanes. A block takes kPasses times the rows that
// its threads cover at once.
#pragma once

#include "cuda/stages.h"
#include "cuda/tile/tile.cuh"

namespace cake_gdn::cuda {

constexpr int kRowThreads = 256;
constexpr int kPasses = 8;

// n / divisor for n < 2^31, by a multiplication (Granlund and Montgomery, 1994, figure 4.1).
struct Divider {
    uint32_t divisor, multiplier, shift;
    __device__ __forceinline__ uint32_t divide(uint32_t n) const { return (__umulhi(n, multiplier) + n) >> shift; }
};
inline Divider divider(uint32_t divisor) {
    uint32_t shift = 0;
    while ((uint64_t(1) << shift) < divisor) ++shift;
    const uint64_t power = uint64_t(1) << shift;
    return {divisor, static_cast<uint32_t>((((power - divisor) << 32) / divisor) + 1), shift};
}

struct RowTiles {
    int64_t rows, T;
    Divider heads;
    int pieces, shift;

    __host__ __device__ int rows_of_pass() const { return kRowThreads >> shift; }
    int64_t blocks() const {
        const int64_t block = int64_t(kPasses) * rows_of_pass();
        return (rows + block - 1) / block;
    }
};

// What both programs may be given; null when it is right.
inline const char *rows_fault(int64_t B, int64_t T, int64_t heads, int64_t columns) {
    constexpr int64_t kMaxTokens = int64_t(1) << 40, kMaxHeads = int64_t(1) << 20;
    if (B < 0 || T < 0 || B > kMaxTokens || T > kMaxTokens || (B > 0 && T > kMaxTokens / B)) return "B, T out of range";
    if (heads < 1 || heads > kMaxHeads) return "heads out of range";
    if (columns < 1 || columns > 128) return "columns must be from 1 to 128";
    return nullptr;
}
inline RowTiles row_tiles(int64_t B, int64_t T, int64_t heads, int64_t columns) {
    RowTiles tiles = {B * T * heads, T, divider(static_cast<uint32_t>(heads)), 0, 0};
    tiles.pieces = static_cast<int>(CAKE_GDN_WIDTH(columns) / 8);
    while ((1 << tiles.shift) < tiles.pieces) ++tiles.shift;
    return tiles;
}

// Elements that one access of a strided tensor's row may take: 8 or 4 where every row is aligned for it and holds a
// whole number of them, else 1. Strides of dimensions of one element say nothing.
inline int row_vector(const void *data, int64_t B, int64_t T, int64_t heads, int64_t columns, int64_t batch,
                      int64_t token, int64_t head, int64_t column) {
    for (const int vector : {8, 4}) {
        const auto fits = [&](int64_t size, int64_t stride) { return size <= 1 || stride % vector == 0; };
        if ((columns <= 1 || column == 1) && columns % vector == 0 && fits(B, batch) && fits(T, token) &&
            fits(heads, head) && reinterpret_cast<uintptr_t>(data) % (2 * vector) == 0) {
            return vector;
        }
    }
    return 1;
}

// Strides of a tensor [B, T, heads, columns] in elements.
struct RowStrides {
    int64_t batch, token, head;
};

// The rows of one thread, one a pass, and where each lies in a strided tensor. Going on is a few additions: 64-bit
// divisions, and the multiplications by strides, are made once.
class RowCursor {
public:
    __device__ __forceinline__ RowCursor(const RowTiles &tiles, const RowStrides &strides) {
        const uint32_t heads = tiles.heads.divisor, step = tiles.rows_of_pass();
        const int64_t first = int64_t(blockIdx.x) * (kPasses * step), first_token = first / heads;
        const uint32_t slot = threadIdx.x >> tiles.shift;
        const uint32_t local = static_cast<uint32_t>(first - first_token * heads) + slot;
        const uint32_t tokens = tiles.heads.divide(local);
        row = first + slot;
        token = first_token + tokens;
        left_ = static_cast<int>(min(tiles.rows - first, int64_t(kPasses * step))) - static_cast<int>(slot);
        head_ = local - tokens * heads;
        const int64_t b = first_token / tiles.T;
        t_ = first_token - b * tiles.T + tokens;
        offset = b * strides.batch + t_ * strides.token + head_ * strides.head;
        step_ = step;
        step_tokens_ = tiles.heads.divide(step);
        step_heads_ = step - step_tokens_ * heads;
        step_offset_ = step_tokens_ * strides.token + step_heads_ * strides.head;
        heads_ = heads;
        T_ = tiles.T;
        next_token_ = strides.token - heads * strides.head;
        next_batch_ = strides.batch - T_ * strides.token;
        enter_batch();
    }

    int64_t row;     // of the flattened [B * T, heads] rows
    int64_t token;   // of the flattened [B * T] tokens
    int64_t offset;  // of the row in the strided tensor, elements

    __device__ __forceinline__ bool exists() const { return left_ > 0; }
    __device__ __forceinline__ void next() {
        row += step_;
        left_ -= static_cast<int>(step_);
        head_ += step_heads_;
        token += step_tokens_;
        t_ += step_tokens_;
        offset += step_offset_;
        if (head_ >= heads_) {
            head_ -= heads_;
            ++token;
            ++t_;
            offset += next_token_;
        }
        enter_batch();
    }

private:
    __device__ __forceinline__ void enter_batch() {
        while (t_ >= T_) {
            t_ -= T_;
            offset += next_batch_;
        }
    }

    int64_t t_, T_, step_offset_, next_token_, next_batch_;
    uint32_t head_, heads_, step_, step_tokens_, step_heads_;
    int left_;  // rows from this one to the block's last
};

// ---- one piece: eight elements of a row ---------------------------------------------------------------------------

template <int Vector>
__device__ __forceinline__ uint4 load_piece(const void *row, int column, int columns, int64_t stride) {
    uint4 bits = {0, 0, 0, 0};
    const uint16_t *from = static_cast<const uint16_t *>(row) + (Vector == 1 ? column * stride : column);
    if constexpr (Vector == 8) {
        if (column < columns) bits = __ldcs(reinterpret_cast<const uint4 *>(from));
    } else if constexpr (Vector == 4) {
        uint2 low = {0, 0}, high = {0, 0};
        if (column < columns) low = __ldcs(reinterpret_cast<const uint2 *>(from));
        if (column + 4 < columns) high = __ldcs(reinterpret_cast<const uint2 *>(from + 4));
        bits = {low.x, low.y, high.x, high.y};
    } else {
        uint32_t e[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) e[i] = column + i < columns ? from[i * stride] : 0;
        bits = {e[0] | e[1] << 16, e[2] | e[3] << 16, e[4] | e[5] << 16, e[6] | e[7] << 16};
    }
    return bits;
}

template <int Vector>
__device__ __forceinline__ void store_piece(void *row, int column, int columns, int64_t stride, const uint4 &bits) {
    uint16_t *to = static_cast<uint16_t *>(row) + (Vector == 1 ? column * stride : column);
    if constexpr (Vector == 8) {
        if (column < columns) *reinterpret_cast<uint4 *>(to) = bits;
    } else if constexpr (Vector == 4) {
        if (column < columns) *reinterpret_cast<uint2 *>(to) = {bits.x, bits.y};
        if (column + 4 < columns) *reinterpret_cast<uint2 *>(to + 4) = {bits.z, bits.w};
    } else {
        const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (column + i < columns) to[i * stride] = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
        }
    }
}

template <class E>
__device__ __forceinline__ void unpack_piece(float (&x)[8], const uint4 &bits) {
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = ptx::unpack<E>(words[i]);
        x[2 * i] = pair.x;
        x[2 * i + 1] = pair.y;
    }
}
template <class E>
__device__ __forceinline__ uint4 pack_piece(const float (&x)[8]) {
    return {ptx::pack<E>(x[0], x[1]), ptx::pack<E>(x[2], x[3]), ptx::pack<E>(x[4], x[5]), ptx::pack<E>(x[6], x[7])};
}

// Sum over the lanes of a row, the same bits in each of them: a tree over the pieces, neighbours first. The whole warp.
__device__ __forceinline__ float sum_row(float value, int shift) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        const float other = __shfl_xor_sync(0xffffffffu, value, 1 << step);
        value = step < shift ? value + other : value;
    }
    return value;
}

}  // namespace cake_gdn::cuda
