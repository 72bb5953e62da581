// Compiled once per unit with that unit's flags: CAKE_GDN_UNIT names it.
#include "kernels.hpp"

#include <type_traits>

#include "cpu/gemm.hpp"
#include "cpu/io.hpp"

#define CAKE_GDN_CONCAT_(a, b) a##b
#define CAKE_GDN_CONCAT(a, b) CAKE_GDN_CONCAT_(a, b)
#define CAKE_GDN_TEXT_(a) #a
#define CAKE_GDN_TEXT(a) CAKE_GDN_TEXT_(a)

namespace cake_gdn_test {
namespace {

namespace cpu = cake_gdn::cpu;

template <class T>
void exponential(T *x, int64_t count) {
    for (int64_t i = 0; i < count; i += cpu::kLanes<T>) cpu::store(x + i, cpu::exponential(cpu::load(x + i)));
}

template <class T>
void gemm(Part part, bool transposed, T *y, int64_t y_pitch, const T *left, int64_t left_pitch, const T *w,
          int64_t w_pitch, int64_t m, int64_t n, int64_t depth, T keep) {
    const cpu::Operand<T> x = transposed ? cpu::columns_of(left, left_pitch) : cpu::rows_of(left, left_pitch);
    switch (part) {
        case Part::whole: cpu::gemm<cpu::Part::whole>(y, y_pitch, x, w, w_pitch, m, n, depth, keep); break;
        case Part::lower_left: cpu::gemm<cpu::Part::lower_left>(y, y_pitch, x, w, w_pitch, m, n, depth, keep); break;
        case Part::upper_left: cpu::gemm<cpu::Part::upper_left>(y, y_pitch, x, w, w_pitch, m, n, depth, keep); break;
        case Part::lower_result:
            cpu::gemm<cpu::Part::lower_result>(y, y_pitch, x, w, w_pitch, m, n, depth, keep);
            break;
    }
}

template <class T>
void solve(bool transposed, T *u, int64_t pitch, const T *n, int64_t n_pitch, int64_t rows, int64_t columns) {
    if (transposed) {
        cpu::solve<true>(u, pitch, n, n_pitch, rows, columns);
    } else {
        cpu::solve<false>(u, pitch, n, n_pitch, rows, columns);
    }
}

template <class T>
void load_rows(T *to, int64_t pitch, const void *from, int dtype, int64_t offset, int64_t row, int64_t column,
               int64_t rows, int64_t columns, int64_t padded_rows) {
    cpu::load_rows(to, pitch, cpu::View{const_cast<void *>(from), dtype, offset, row, column}, rows, columns,
                   padded_rows);
}

template <class T>
void store_rows(void *to, int dtype, int64_t offset, int64_t row, int64_t column, const T *from, int64_t pitch,
                int64_t rows, int64_t columns) {
    cpu::store_rows(cpu::View{to, dtype, offset, row, column}, from, pitch, rows, columns);
}

template <class T>
constexpr KernelsOf<T> kernels_of() {
    return {cpu::kLanes<T>,    cpu::kTileRows, exponential<T>, cpu::dot<T>,  cpu::add_scaled<T>, cpu::scale_row<T>,
            cpu::transpose<T>, gemm<T>,        solve<T>,       load_rows<T>, store_rows<T>};
}

}  // namespace

extern const Kernels CAKE_GDN_CONCAT(kernels_, CAKE_GDN_UNIT);
constexpr Kernels CAKE_GDN_CONCAT(kernels_, CAKE_GDN_UNIT) = {CAKE_GDN_TEXT(CAKE_GDN_UNIT), kernels_of<float>(),
                                                              kernels_of<double>()};

}  // namespace cake_gdn_test
