// The inner functions of one instruction-set unit, each against its definition: conversions over all bit patterns, the
// exponential, transposition, products, triangular solves.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "kernels.hpp"
#include "support.hpp"

using namespace cake_gdn_test;

namespace {

const Kernels &kernels() {
#if defined(__x86_64__)
    if (unit_under_test().name == std::string("avx512")) return kernels_avx512;
    if (unit_under_test().name == std::string("avx2")) return kernels_avx2;
#endif
    return kernels_baseline;
}
template <class T>
const KernelsOf<T> &kernels_for() {
    if constexpr (sizeof(T) == 4) {
        return kernels().f32;
    } else {
        return kernels().f64;
    }
}

// A matrix of rows of 64-byte multiples, as the engine keeps them, NaN where nothing was put.
template <class T>
class Matrix {
public:
    Matrix(int64_t rows, int64_t pitch) : pitch(pitch), memory_(size_t(rows * pitch) + 128 / sizeof(T)) {
        for (T &x : memory_) x = std::numeric_limits<T>::quiet_NaN();
        void *start = memory_.data();
        size_t space = memory_.size() * sizeof(T);
        data = static_cast<T *>(std::align(64, size_t(rows * pitch) * sizeof(T), start, space));
    }
    Matrix(const Matrix &) = delete;
    T &operator()(int64_t r, int64_t c) { return data[r * pitch + c]; }
    void fill(Random &random, int64_t rows, int64_t columns, double low = -1, double high = 1) {
        for (int64_t r = 0; r < rows; ++r) {
            for (int64_t c = 0; c < columns; ++c) (*this)(r, c) = T(random.uniform(low, high));
        }
    }
    int64_t pitch;
    T *data;

private:
    std::vector<T> memory_;
};

template <class T>
constexpr double kEpsilon = sizeof(T) == 4 ? 0x1p-23 : 0x1p-52;

float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

struct Half {
    int dtype, exponent_bits, mantissa_bits;
};
const Half kHalves[] = {{CAKE_GDN_BF16, 8, 7}, {CAKE_GDN_FP16, 5, 10}};

// Counts values whose stored 16-bit code is not the nearest one, through rows of every vector-loop length.
int64_t wrong_codes(const Half &half, const std::vector<float> &values, int64_t stride) {
    const int64_t count = int64_t(values.size());
    std::vector<uint16_t> codes(size_t(count * stride), 0xbeef);
    kernels().f32.store_rows(codes.data(), half.dtype, 0, count * stride, stride, values.data(), count, 1, count);
    int64_t wrong = 0;
    for (int64_t i = 0; i < count * stride; ++i) {
        const uint16_t got = codes[size_t(i)];
        if (i % stride != 0) {
            wrong += got != 0xbeef;
            continue;
        }
        const float value = values[size_t(i / stride)];
        if (std::isnan(value)) {
            wrong += !std::isnan(decode16(got, half.exponent_bits, half.mantissa_bits));
        } else {
            wrong += got != encode16(double(value), half.exponent_bits, half.mantissa_bits);
        }
    }
    return wrong;
}

template <class T>
int64_t wrong_values(const Half &half, int64_t stride) {
    std::vector<uint16_t> codes(size_t(65536 * stride), 0x7fff);
    for (int64_t i = 0; i < 65536; ++i) codes[size_t(i * stride)] = uint16_t(i);
    Matrix<T> to(1, 65536);
    kernels_for<T>().load_rows(to.data, 65536, codes.data(), half.dtype, 0, 0, stride, 1, 65536, 1);
    int64_t wrong = 0;
    for (int64_t i = 0; i < 65536; ++i) {
        const double wanted = decode16(uint16_t(i), half.exponent_bits, half.mantissa_bits), got = double(to(0, i));
        const bool same =
            std::isnan(wanted) ? std::isnan(got) : got == wanted && std::signbit(got) == std::signbit(wanted);
        wrong += !same;
    }
    return wrong;
}

// Every finite value of the type, and what surrounds the point half way to the next.
std::vector<float> rounding_cases(const Half &half) {
    std::vector<float> values;
    for (int code = 0; code < 65536; ++code) {
        const double low = decode16(uint16_t(code), half.exponent_bits, half.mantissa_bits);
        if (!std::isfinite(low)) continue;
        double high = decode16(uint16_t(code + 1), half.exponent_bits, half.mantissa_bits);
        if (!std::isfinite(high))
            high = low + (low - decode16(uint16_t(code - 1), half.exponent_bits, half.mantissa_bits));
        const float middle = float((low + high) / 2);
        const float infinity = std::numeric_limits<float>::infinity();
        values.insert(values.end(),
                      {float(low), middle, std::nextafterf(middle, infinity), std::nextafterf(middle, -infinity)});
    }
    return values;
}

}  // namespace

TEST_CASE("16-bit floats: all 65536 patterns load exactly, contiguous and strided, in both precisions") {
    for (const Half &half : kHalves) {
        for (int64_t stride : {1, 3}) {
            CAPTURE(half.dtype);
            CAPTURE(stride);
            CHECK(wrong_values<float>(half, stride) == 0);
            CHECK(wrong_values<double>(half, stride) == 0);
        }
    }
}

TEST_CASE("16-bit floats: stores round to nearest, ties to even, at every midpoint, overflow and subnormal") {
    for (const Half &half : kHalves) {
        CAPTURE(half.dtype);
        const std::vector<float> values = rounding_cases(half);
        REQUIRE(values.size() > 250000);
        CHECK(wrong_codes(half, values, 1) == 0);
        CHECK(wrong_codes(half, values, 2) == 0);
    }
}

TEST_CASE("16-bit floats: stores of arbitrary bits, infinities and NaNs of every payload") {
    Random random(21);
    std::vector<float> values;
    for (int i = 0; i < 200000; ++i) values.push_back(float_of(uint32_t(random.bits())));
    for (uint32_t payload = 1; payload < 1u << 23; payload += 8191) {
        values.push_back(float_of(0x7f800000u | payload));
        values.push_back(float_of(0xff800000u | payload));
    }
    const float edges[] = {0.0f,
                           -0.0f,
                           65504.0f,
                           65519.996f,
                           65520.0f,
                           65536.0f,
                           1e30f,
                           float_of(0x7f800000u),
                           float_of(0xff800000u),
                           float_of(0x7f7fffffu),
                           float_of(1),
                           float_of(0x80000001u)};
    values.insert(values.end(), std::begin(edges), std::end(edges));
    for (const Half &half : kHalves) {
        CAPTURE(half.dtype);
        CHECK(wrong_codes(half, values, 1) == 0);
    }
}

TEST_CASE("rows: only what exists is read and written, padding is zero, any strides") {
    Random random(22);
    for (int dtype : {CAKE_GDN_BF16, CAKE_GDN_FP16, CAKE_GDN_FP32, CAKE_GDN_FP64}) {
        for (Layout layout : {Layout::contiguous, Layout::spread, Layout::permuted, Layout::reversed}) {
            const int64_t rows = random.integer(1, 64), columns = random.integer(1, 70),
                          pitch = (columns + 15) / 16 * 16;
            Tensor from(dtype, {rows, columns}, layout), to(dtype, {rows, columns}, layout);
            from.fill(random, -2, 2);
            const cake_gdn_tensor in = from.view(), out = to.view();
            Matrix<float> matrix(64, pitch);
            kernels().f32.load_rows(matrix.data, pitch, in.data, dtype, 0, in.stride[0], in.stride[1], rows, columns,
                                    64);
            for (int64_t r = 0; r < 64; ++r) {
                for (int64_t c = 0; c < pitch; ++c) {
                    const float wanted = r < rows && c < columns ? float(from.get(r * columns + c)) : 0.0f;
                    if (!(matrix(r, c) == wanted)) REQUIRE(matrix(r, c) == wanted);
                }
            }
            kernels().f32.store_rows(out.data, dtype, 0, out.stride[0], out.stride[1], matrix.data, pitch, rows,
                                     columns);
            CHECK(to.guards_intact());
            if (dtype != CAKE_GDN_FP64) CHECK(to.values() == from.values());
        }
    }
}

TEST_CASE("exponential: within 1.5 units in the last place over the whole range") {
    const int64_t lanes = kernels().f32.lanes;
    double worst = 0;
    float worst_at = 0;
    Matrix<float> x(1, 1 << 12);
    std::vector<float> arguments;
    const auto flush = [&] {
        while (int64_t(arguments.size()) % lanes) arguments.push_back(0);
        const int64_t count = int64_t(arguments.size());
        for (int64_t i = 0; i < count; ++i) x(0, i) = arguments[size_t(i)];
        kernels().f32.exponential(x.data, count);
        for (int64_t i = 0; i < count; ++i) {
            const double wanted = std::exp(double(arguments[size_t(i)]));
            const double unit = std::ldexp(1.0, std::max(std::ilogb(wanted), -126) - 23);
            const double ulps = std::fabs(double(x(0, i)) - wanted) / unit;
            if (!(ulps <= worst)) worst = ulps, worst_at = arguments[size_t(i)];
        }
        arguments.clear();
    };
    // Every 997th float whose exponential is a normal number, both signs, and a fine sweep where gates live.
    for (uint32_t bits = 0; bits <= 0x42b17217u; bits += 997) {  // 88.72283
        arguments.push_back(float_of(bits));
        if (float_of(bits) < 87.336f) arguments.push_back(-float_of(bits));
        if (arguments.size() > 4000) flush();
    }
    for (int i = 0; i <= 400000; ++i) {
        arguments.push_back(-20.0f * float(i) / 400000.0f);
        if (arguments.size() > 4000) flush();
    }
    flush();
    MESSAGE(std::string(kernels().name) << ": largest error " << worst << " ulp at x = " << worst_at);
    CHECK(worst < 1.5);  // 0.89 with fused multiply-add, 1.19 without
}

TEST_CASE("exponential: one at zero, zero below the normal numbers, infinity above, NaN through") {
    const float infinity = std::numeric_limits<float>::infinity();
    const struct {
        float x, wanted;
    } cases[] = {{0.0f, 1.0f},      {-0.0f, 1.0f},        {-87.5f, 0.0f},     {-88.0f, 0.0f},
                 {-1e30f, 0.0f},    {-infinity, 0.0f},    {88.73f, infinity}, {89.5f, infinity},
                 {1e30f, infinity}, {infinity, infinity}, {1e-30f, 1.0f},     {-1e-40f, 1.0f}};
    const int64_t lanes = kernels().f32.lanes;
    Matrix<float> x(1, 64);
    for (const auto &c : cases) {
        for (int64_t i = 0; i < lanes; ++i) x(0, i) = c.x;
        kernels().f32.exponential(x.data, lanes);
        CAPTURE(c.x);
        for (int64_t i = 0; i < lanes; ++i) CHECK(x(0, i) == c.wanted);
    }
    // A lane's neighbours do not matter.
    for (int64_t i = 0; i < lanes; ++i) x(0, i) = i % 2 ? std::numeric_limits<float>::quiet_NaN() : -1.0f;
    kernels().f32.exponential(x.data, lanes);
    for (int64_t i = 0; i < lanes; ++i) {
        CHECK(std::isnan(x(0, i)) == (i % 2 == 1));
        if (i % 2 == 0) CHECK(double(x(0, i)) == doctest::Approx(std::exp(-1.0)).epsilon(1e-6));
    }
    // A decay never grows: e^x <= 1 for x <= 0.
    int64_t above = 0;
    for (uint32_t bits = 0; bits < 0x42b00000u; bits += 1009 * 16) {
        for (int64_t i = 0; i < lanes; ++i) x(0, i) = -float_of(bits + uint32_t(i) * 1009);
        kernels().f32.exponential(x.data, lanes);
        for (int64_t i = 0; i < lanes; ++i) above += !(x(0, i) <= 1.0f);
    }
    CHECK(above == 0);
}

TEST_CASE("exponential in double is the C library's") {
    Matrix<double> x(1, 64);
    Random random(23);
    x.fill(random, 1, 64, -800, 720);
    std::vector<double> before(x.data, x.data + 64);
    kernels().f64.exponential(x.data, 64);
    for (int64_t i = 0; i < 64; ++i) CHECK(x(0, i) == std::exp(before[size_t(i)]));
}

TEST_CASE_TEMPLATE("row operations", T, float, double) {
    Random random(24);
    const KernelsOf<T> &kernel = kernels_for<T>();
    for (int64_t n : {16, 32, 48, 128, 512}) {
        Matrix<T> a(1, n), b(1, n);
        a.fill(random, 1, n);
        b.fill(random, 1, n);
        double wanted = 0, size = 0;
        for (int64_t i = 0; i < n; ++i) {
            wanted += double(a(0, i)) * double(b(0, i));
            size += std::fabs(double(a(0, i)) * double(b(0, i)));
        }
        CHECK(std::fabs(double(kernel.dot(a.data, b.data, n)) - wanted) <= double(n) * kEpsilon<T> * size);
        std::vector<T> old(b.data, b.data + n);
        kernel.add_scaled(b.data, a.data, T(0.75), n);
        int64_t wrong = 0;
        for (int64_t i = 0; i < n; ++i) {
            const double exact = double(old[size_t(i)]) + 0.75 * double(a(0, i));
            wrong += !(std::fabs(double(b(0, i)) - exact) <= 2 * kEpsilon<T>);
        }
        old.assign(a.data, a.data + n);
        kernel.scale_row(a.data, T(-3), n);
        for (int64_t i = 0; i < n; ++i) wrong += a(0, i) != T(-3) * old[size_t(i)];
        CHECK(wrong == 0);
    }
}

TEST_CASE_TEMPLATE("transpose: exact, for every multiple of the lanes", T, float, double) {
    Random random(25);
    const int64_t L = kernels_for<T>().lanes;
    for (int64_t rows = L; rows <= 64; rows += L) {
        for (int64_t columns = L; columns <= 80; columns += L) {
            // Padded pitches: neighbours must not be touched.
            Matrix<T> from(rows, columns + 64 / int64_t(sizeof(T))), to(columns, rows + 64 / int64_t(sizeof(T)));
            from.fill(random, rows, columns);
            kernels_for<T>().transpose(to.data, to.pitch, from.data, from.pitch, rows, columns);
            int64_t wrong = 0;
            for (int64_t c = 0; c < columns; ++c) {
                for (int64_t r = 0; r < rows; ++r) wrong += to(c, r) != from(r, c);
                for (int64_t r = rows; r < to.pitch; ++r) wrong += !std::isnan(to(c, r));
            }
            CHECK(wrong == 0);
        }
    }
}

TEST_CASE_TEMPLATE("products: every part, both orientations, any size", T, float, double) {
    Random random(26);
    const int64_t L = kernels_for<T>().lanes, R = kernels_for<T>().tile_rows;
    for (int round = 0; round < 200; ++round) {
        const Part part = Part(random.integer(0, 3));
        const bool transposed = random.integer(0, 1), keeping = random.integer(0, 1);
        const int64_t m = R * random.integer(1, 64 / R), n = L * random.integer(1, 96 / L);
        // The triangular left operands are of the chunk's tokens, whose count may be below the rounded rows.
        const bool triangular = part == Part::lower_left || part == Part::upper_left;
        const int64_t depth = triangular ? m - random.integer(0, R - 1) : random.integer(1, 100);
        const T keep = keeping ? T(0.5) : T(0);
        Matrix<T> left(transposed ? depth : m, 112), w(depth, n), y(m, n);
        w.fill(random, depth, n);
        if (keeping) y.fill(random, m, n);  // else NaN: not read
        Matrix<T> old(m, n);
        for (int64_t i = 0; i < m; ++i) {
            for (int64_t j = 0; j < n; ++j) old(i, j) = y(i, j);
            for (int64_t c = 0; c < depth; ++c) {
                T value = T(random.uniform(-1, 1));
                if ((part == Part::lower_left && c > i) || (part == Part::upper_left && c < i)) value = T(0);
                (transposed ? left(c, i) : left(i, c)) = value;
            }
        }
        kernels_for<T>().gemm(part, transposed, y.data, y.pitch, left.data, left.pitch, w.data, w.pitch, m, n, depth,
                              keep);
        int64_t wrong = 0;
        for (int64_t i = 0; i < m; ++i) {
            for (int64_t j = 0; j < n; ++j) {
                if (part == Part::lower_result && j > i) continue;
                double sum = keeping ? 0.5 * double(old(i, j)) : 0, size = std::fabs(sum);
                for (int64_t c = 0; c < depth; ++c) {
                    const double term = double(transposed ? left(c, i) : left(i, c)) * double(w(c, j));
                    sum += term;
                    size += std::fabs(term);
                }
                wrong += !(std::fabs(double(y(i, j)) - sum) <= double(depth + 2) * kEpsilon<T> * size);
            }
        }
        CAPTURE(round);
        CHECK(wrong == 0);
    }
}

TEST_CASE_TEMPLATE("products: an element's bits do not depend on the tile it falls in", T, float, double) {
    Random random(27);
    const int64_t L = kernels_for<T>().lanes, R = kernels_for<T>().tile_rows, depth = 70;
    const int64_t m = 64, n = 7 * L;  // an odd number of vectors: the last tile is narrower
    Matrix<T> left(m, 80), w(depth, n), y(m, n), one(R, L);
    left.fill(random, m, depth);
    w.fill(random, depth, n);
    kernels_for<T>().gemm(Part::whole, false, y.data, n, left.data, 80, w.data, n, m, n, depth, T(0));
    int64_t wrong = 0;
    for (int64_t i = 0; i < m; i += R) {
        for (int64_t j = 0; j < n; j += L) {
            kernels_for<T>().gemm(Part::whole, false, one.data, L, left.data + i * 80, 80, w.data + j, n, R, L, depth,
                                  T(0));
            for (int64_t r = 0; r < R; ++r) {
                for (int64_t c = 0; c < L; ++c) wrong += one(r, c) != y(i + r, j + c);
            }
        }
    }
    CHECK(wrong == 0);
}

TEST_CASE_TEMPLATE("triangular solves: both orientations, any size, the upper part of the matrix is not read", T, float,
                   double) {
    Random random(28);
    const int64_t L = kernels_for<T>().lanes, R = kernels_for<T>().tile_rows;
    for (int round = 0; round < 120; ++round) {
        const bool transposed = random.integer(0, 1);
        const int64_t rows = R * random.integer(1, 64 / R), columns = L * random.integer(1, 80 / L);
        Matrix<T> n(rows, 64), u(rows, columns);
        for (int64_t i = 0; i < rows; ++i) {
            for (int64_t j = 0; j < i; ++j) n(i, j) = T(random.uniform(-0.5, 0.5));
        }
        u.fill(random, rows, columns);
        std::vector<double> exact(size_t(rows * columns));
        for (int64_t i = 0; i < rows; ++i) {
            for (int64_t j = 0; j < columns; ++j) exact[size_t(i * columns + j)] = double(u(i, j));
        }
        for (int64_t s = 0; s < rows; ++s) {
            const int64_t i = transposed ? rows - 1 - s : s;
            for (int64_t c = transposed ? i + 1 : 0; c < (transposed ? rows : i); ++c) {
                const double factor = double(transposed ? n(c, i) : n(i, c));
                for (int64_t j = 0; j < columns; ++j) {
                    exact[size_t(i * columns + j)] += factor * exact[size_t(c * columns + j)];
                }
            }
        }
        kernels_for<T>().solve(transposed, u.data, columns, n.data, 64, rows, columns);
        double worst = 0, largest = 0;
        for (int64_t i = 0; i < rows; ++i) {
            for (int64_t j = 0; j < columns; ++j) {
                const double difference = std::fabs(double(u(i, j)) - exact[size_t(i * columns + j)]);
                worst = difference <= worst ? worst : difference;
                largest = std::max(largest, std::fabs(exact[size_t(i * columns + j)]));
            }
        }
        CAPTURE(round);
        CHECK(worst <= 100 * kEpsilon<T> * largest);
    }
}
