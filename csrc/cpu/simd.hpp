// Vectors of one instruction set, and the few operations on them that the engine needs. Included by unit.cpp only, once
// per unit; everything is in an unnamed namespace, so that code compiled for one instruction set can never stand in for
// another's at link time.
#pragma once

#include <cstdint>
#include <utility>

namespace cake_gdn::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kTileRows = 8;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32, kTileRows = 4;
#else
constexpr int kVectorBytes = 16, kTileRows = 4;
#endif

template <class T>
struct VectorOf;
template <>
struct VectorOf<float> {
    typedef float type __attribute__((vector_size(kVectorBytes), may_alias));
    typedef int32_t index __attribute__((vector_size(kVectorBytes), may_alias));
};
template <>
struct VectorOf<double> {
    typedef double type __attribute__((vector_size(kVectorBytes), may_alias));
    typedef int64_t index __attribute__((vector_size(kVectorBytes), may_alias));
};

template <class T>
using Vec = typename VectorOf<T>::type;
template <class T>
using IndexVec = typename VectorOf<T>::index;
template <class T>
constexpr int kLanes = kVectorBytes / int(sizeof(T));

inline float square_root(float x) { return __builtin_sqrtf(x); }
inline double square_root(double x) { return __builtin_sqrt(x); }

inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

// Rows are padded and aligned to 64 bytes, so every access is whole and aligned.
template <class T>
inline Vec<T> load(const T *p) {
    return *reinterpret_cast<const Vec<T> *>(p);
}
template <class T>
inline void store(T *p, Vec<T> v) {
    *reinterpret_cast<Vec<T> *>(p) = v;
}

// x in every lane. x - 0 is x for every x, so only the broadcast is left (0 + x would not be: -0).
template <class T>
inline Vec<T> splat(T x) {
    return x - Vec<T>{};
}

template <class T>
inline IndexVec<T> lane_index() {
    IndexVec<T> index = {};
    for (int i = 0; i < kLanes<T>; ++i) index[i] = i;
    return index;
}

// Sum of the lanes, in lane order.
template <class T>
inline T sum_lanes(Vec<T> v) {
    T sum = v[0];
    for (int i = 1; i < kLanes<T>; ++i) sum += v[i];
    return sum;
}

// sum(a[i] * b[i]) over n elements, n a multiple of the lanes (padding is zero).
template <class T>
inline T dot(const T *a, const T *b, int64_t n) {
    Vec<T> sum = load(a) * load(b);
    for (int64_t i = kLanes<T>; i < n; i += kLanes<T>) sum += load(a + i) * load(b + i);
    return sum_lanes<T>(sum);
}

// y[i] += factor * x[i]
template <class T>
inline void add_scaled(T *y, const T *x, T factor, int64_t n) {
    for (int64_t i = 0; i < n; i += kLanes<T>) store(y + i, load(y + i) + factor * load(x + i));
}

// x[i] *= factor
template <class T>
inline void scale_row(T *x, T factor, int64_t n) {
    for (int64_t i = 0; i < n; i += kLanes<T>) store(x + i, factor * load(x + i));
}

// e^x. Below the smallest normal number the result is 0, above the largest it is infinity.
inline Vec<float> exponential(Vec<float> x) {
    const Vec<float> magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    Vec<float> clamped = x < -88.0f ? splat(-88.0f) : x;
    clamped = clamped > 89.0f ? splat(89.0f) : clamped;
    const Vec<float> n = clamped * 1.44269504088896341f + magic - magic;
    // x - n ln 2 in two parts: the first has few bits, so that its product with n is exact.
    const Vec<float> r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
    // Taylor's series to degree 7: on |r| <= 0.35 its truncation is below 6e-9.
    Vec<float> p = splat(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    // 2^n in two factors: 2^128 is not a float, 2^64 * 2^64 overflows to infinity as it should.
    const IndexVec<float> whole = __builtin_convertvector(n, IndexVec<float>);
    const IndexVec<float> half = whole >> 1;
    const IndexVec<float> low = (half + 127) << 23, high = (whole - half + 127) << 23;
    const Vec<float> value = p * reinterpret_cast<const Vec<float> &>(low) * reinterpret_cast<const Vec<float> &>(high);
    return x < -87.33654f ? Vec<float>{} : (x != x ? x : value);
}

inline Vec<double> exponential(Vec<double> x) {
    Vec<double> value = {};
    for (int i = 0; i < kLanes<double>; ++i) value[i] = __builtin_exp(x[i]);
    return value;
}

// One step of the transposition of a square block (Eklundh): swaps the off-diagonal quarters of size Step.
template <int Step, class V, int... I>
inline void swap_quarters(V &a, V &b, std::integer_sequence<int, I...>) {
    constexpr int L = sizeof...(I);
    const V low = __builtin_shufflevector(a, b, ((I & Step) ? L + I - Step : I)...);
    const V high = __builtin_shufflevector(a, b, ((I & Step) ? L + I : I + Step)...);
    a = low;
    b = high;
}

template <int Step, class V, int L>
inline void transpose_block(V (&rows)[L]) {
    if constexpr (Step > 0) {
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) {
            if ((i & Step) == 0) {
                swap_quarters<Step>(rows[i], rows[i + Step], std::make_integer_sequence<int, L>{});
            }
        }
        transpose_block<Step / 2>(rows);
    }
}

// to[c, r] = from[r, c] for a matrix of `rows` x `columns`, both multiples of the lanes.
template <class T>
inline void transpose(T *to, int64_t to_pitch, const T *from, int64_t from_pitch, int64_t rows, int64_t columns) {
    constexpr int L = kLanes<T>;
    for (int64_t r = 0; r < rows; r += L) {
        for (int64_t c = 0; c < columns; c += L) {
            Vec<T> block[L];
#pragma GCC unroll 16
            for (int i = 0; i < L; ++i) block[i] = load(from + (r + i) * from_pitch + c);
            transpose_block<L / 2>(block);
#pragma GCC unroll 16
            for (int i = 0; i < L; ++i) store(to + (c + i) * to_pitch + r, block[i]);
        }
    }
}

}  // namespace
}  // namespace cake_gdn::cpu
