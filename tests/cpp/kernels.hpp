// The inner functions of the engine as one unit compiles them. A table of plain pointers: nothing of a unit runs before
// the test has asked whether the machine can.
#pragma once

#include <cstdint>

namespace cake_gdn_test {

// The parts of a product that gemm.hpp knows, by the same names.
enum class Part { whole, lower_left, upper_left, lower_result };

// For T = float or double.
template <class T>
struct KernelsOf {
    int lanes, tile_rows;
    void (*exponential)(T *x, int64_t count);  // in place; count a multiple of the lanes
    T (*dot)(const T *a, const T *b, int64_t count);
    void (*add_scaled)(T *y, const T *x, T factor, int64_t count);
    void (*scale_row)(T *x, T factor, int64_t count);
    void (*transpose)(T *to, int64_t to_pitch, const T *from, int64_t from_pitch, int64_t rows, int64_t columns);
    // `left` is [m, depth] at `left_pitch`, or [depth, m] when transposed.
    void (*gemm)(Part part, bool transposed, T *y, int64_t y_pitch, const T *left, int64_t left_pitch, const T *w,
                 int64_t w_pitch, int64_t m, int64_t n, int64_t depth, T keep);
    void (*solve)(bool transposed, T *u, int64_t pitch, const T *n, int64_t n_pitch, int64_t rows, int64_t columns);
    void (*load_rows)(T *to, int64_t pitch, const void *from, int dtype, int64_t offset, int64_t row, int64_t column,
                      int64_t rows, int64_t columns, int64_t padded_rows);
    void (*store_rows)(void *to, int dtype, int64_t offset, int64_t row, int64_t column, const T *from, int64_t pitch,
                       int64_t rows, int64_t columns);
};

struct Kernels {
    const char *name;
    KernelsOf<float> f32;
    KernelsOf<double> f64;
};

extern const Kernels kernels_baseline;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

}  // namespace cake_gdn_test
