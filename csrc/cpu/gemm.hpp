// The dense products of one chunk and the triangular solves, as register tiles of kTileRows x 2 vectors. An element's sum
// runs over the reduction index in ascending order in one accumulator, whatever tile it falls in.
#pragma once

#include "cpu/simd.hpp"

namespace cake_gdn::cpu {
namespace {

// The left operand: element (m, c) is data[m * row + c * column], so a matrix and its transpose are the same thing.
template <class T>
struct Operand {
    const T *data;
    int64_t row, column;
};

template <class T>
inline Operand<T> rows_of(const T *data, int64_t pitch) {
    return {data, pitch, 1};
}
template <class T>
inline Operand<T> columns_of(const T *data, int64_t pitch) {
    return {data, 1, pitch};
}

// Where the left operand is known to be zero (beyond the diagonal's tile), or which results are wanted.
enum class Part {
    whole,
    lower_left,  // left(m, c) = 0 for c > m
    upper_left,  // left(m, c) = 0 for c < m
    lower_result  // only result(m, n) with n <= m is needed: what lies beyond is left as it was, or written, tile by tile
};

template <class T, int NV>
inline void gemm_tile(T *y, int64_t y_pitch, Operand<T> x, const T *w, int64_t w_pitch, int64_t from, int64_t to,
                      T keep) {
    constexpr int L = kLanes<T>;
    Vec<T> sum[kTileRows][NV] = {};
    for (int64_t c = from; c < to; ++c) {
        Vec<T> right[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) right[v] = load(w + c * w_pitch + v * L);
#pragma GCC unroll 8
        for (int m = 0; m < kTileRows; ++m) {
            const Vec<T> left = splat(x.data[m * x.row + c * x.column]);
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v) sum[m][v] += left * right[v];
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < kTileRows; ++m) {
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) {
            T *at = y + m * y_pitch + v * L;
            store(at, keep == T(0) ? sum[m][v] : keep * load(at) + sum[m][v]);
        }
    }
}

// y = keep * y + x w for m x n results over `depth` terms; m a multiple of kTileRows, n of the lanes. With keep = 0 the
// old y is not read, so it may hold anything.
template <Part part = Part::whole, class T>
inline void gemm(T *y, int64_t y_pitch, Operand<T> x, const T *w, int64_t w_pitch, int64_t m, int64_t n, int64_t depth,
                 T keep) {
    constexpr int L = kLanes<T>;
    for (int64_t n0 = 0; n0 < n;) {
        const bool pair = n - n0 >= 2 * L;
        for (int64_t m0 = 0; m0 < m; m0 += kTileRows) {
            if (part == Part::lower_result && n0 >= m0 + kTileRows) continue;
            const int64_t from = part == Part::upper_left ? lesser(m0, depth) : 0;
            const int64_t to = part == Part::lower_left ? lesser(m0 + kTileRows, depth) : depth;
            const Operand<T> tile{x.data + m0 * x.row, x.row, x.column};
            T *at = y + m0 * y_pitch + n0;
            if (pair) {
                gemm_tile<T, 2>(at, y_pitch, tile, w + n0, w_pitch, from, to, keep);
            } else {
                gemm_tile<T, 1>(at, y_pitch, tile, w + n0, w_pitch, from, to, keep);
            }
        }
        n0 += pair ? 2 * L : L;
    }
}

// One tile of a triangular solve: the terms outside the diagonal tile as in gemm_tile, then the tile itself.
template <bool transposed, class T, int NV>
inline void solve_tile(T *u, int64_t pitch, const T *n, int64_t n_pitch, int64_t m0, int64_t rows) {
    constexpr int L = kLanes<T>;
    const auto coefficient = [&](int64_t m, int64_t c) { return transposed ? n[c * n_pitch + m] : n[m * n_pitch + c]; };
    Vec<T> sum[kTileRows][NV];
#pragma GCC unroll 8
    for (int m = 0; m < kTileRows; ++m) {
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) sum[m][v] = load(u + (m0 + m) * pitch + v * L);
    }
    const int64_t from = transposed ? m0 + kTileRows : 0, to = transposed ? rows : m0;
    for (int64_t c = from; c < to; ++c) {
        Vec<T> right[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) right[v] = load(u + c * pitch + v * L);
#pragma GCC unroll 8
        for (int m = 0; m < kTileRows; ++m) {
            const Vec<T> left = splat(coefficient(m0 + m, c));
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v) sum[m][v] += left * right[v];
        }
    }
#pragma GCC unroll 8
    for (int i = 1; i < kTileRows; ++i) {
        const int m = transposed ? kTileRows - 1 - i : i;
#pragma GCC unroll 8
        for (int j = 0; j < i; ++j) {
            const int c = transposed ? kTileRows - 1 - j : j;
            const Vec<T> left = splat(coefficient(m0 + m, m0 + c));
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v) sum[m][v] += left * sum[c][v];
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < kTileRows; ++m) {
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) store(u + (m0 + m) * pitch + v * L, sum[m][v]);
    }
}

// u <- (I - n)^-1 u (or its transpose's) for strictly lower n of rows x rows, by blocked substitution; rows a multiple of
// kTileRows. Substitution, not a product with the explicit inverse: it is as stable as the recurrence itself, also where
// keys repeat and the inverse's entries alternate.
template <bool transposed, class T>
inline void solve(T *u, int64_t pitch, const T *n, int64_t n_pitch, int64_t rows, int64_t columns) {
    constexpr int L = kLanes<T>;
    for (int64_t n0 = 0; n0 < columns;) {
        const bool pair = columns - n0 >= 2 * L;
        for (int64_t i = 0; i < rows; i += kTileRows) {
            const int64_t m0 = transposed ? rows - kTileRows - i : i;
            if (pair) {
                solve_tile<transposed, T, 2>(u + n0, pitch, n, n_pitch, m0, rows);
            } else {
                solve_tile<transposed, T, 1>(u + n0, pitch, n, n_pitch, m0, rows);
            }
        }
        n0 += pair ? 2 * L : L;
    }
}

}  // namespace
}  // namespace cake_gdn::cpu
