// Strided tensors of any floating dtype to and from the engine's padded rows. Only rows and columns that exist are
// touched; padding is written as zero.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cake_gdn_det/cake_gdn_det.h"

namespace cake_gdn::cpu {
namespace {

inline float bits_to_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline uint32_t float_to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

struct BFloat16 {
    uint16_t bits;
    BFloat16() = default;
    explicit BFloat16(float value) {
        const uint32_t u = float_to_bits(value);
        const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;  // to nearest, ties to even
        bits = uint16_t((u & 0x7fffffff) > 0x7f800000 ? (u >> 16) | 0x40 : rounded);
    }
    explicit operator float() const { return bits_to_float(uint32_t(bits) << 16); }
};

// IEEE half by branch-free integer arithmetic, so that the loops vectorise on every instruction set.
struct Float16 {
    uint16_t bits;
    Float16() = default;
    explicit Float16(float value) {
        const uint32_t u = float_to_bits(value), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff;
        // Normal: rebias the exponent and round the 13 dropped bits to nearest even.
        const uint32_t normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
        // Subnormal: adding 0.5 aligns the mantissa to half's smallest step, and rounds.
        const uint32_t subnormal = float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000;
        uint32_t half = magnitude < (113u << 23) ? subnormal : normal;
        half = magnitude >= 0x477ff000 ? 0x7c00 : half;  // 65520 and above: infinity
        half = magnitude > 0x7f800000 ? 0x7e00 : half;   // NaN
        bits = uint16_t(sign | half);
    }
    explicit operator float() const {
        const uint32_t sign = uint32_t(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
        // 2^112 moves half's exponent bias to float's and makes subnormals exact.
        const uint32_t scaled = float_to_bits(bits_to_float(magnitude << 13) * bits_to_float(239u << 23));
        return bits_to_float(sign | (magnitude >= 0x7c00 ? (magnitude << 13) | 0x7f800000 : scaled));
    }
};

template <class T, class S>
inline T convert_in(S value) {
    if constexpr (sizeof(S) == 2) {
        return T(float(value));
    } else {
        return T(value);
    }
}
// Nearest float, but with the last bit set when inexact (round to odd): what is then rounded to 16 bits is rounded as
// the double itself would be, not twice.
inline float narrow(double value) {
    const float nearest = float(value);
    if (double(nearest) == value || value != value) return nearest;
    const uint32_t bits = float_to_bits(nearest);
    const bool away = __builtin_fabs(double(nearest)) > __builtin_fabs(value);
    return bits_to_float((away ? bits - 1 : bits) | 1);
}
inline float narrow(float value) { return value; }

template <class D, class T>
inline D convert_out(T value) {
    if constexpr (sizeof(D) == 2) {
        return D(narrow(value));
    } else {
        return D(value);
    }
}

// Calls f with a null pointer of the element type.
template <class F>
inline void with_dtype(int dtype, F &&f) {
    switch (dtype) {
        case CAKE_GDN_BF16: f(static_cast<BFloat16 *>(nullptr)); break;
        case CAKE_GDN_FP16: f(static_cast<Float16 *>(nullptr)); break;
        case CAKE_GDN_FP32: f(static_cast<float *>(nullptr)); break;
        default: f(static_cast<double *>(nullptr)); break;
    }
}

// A matrix inside a tensor: element (r, c) is `offset + r * row + c * column` elements from data.
struct View {
    void *data;
    int32_t dtype;
    int64_t offset, row, column;
};

// to[r, c] = from[r, c] for rows x columns; zero up to padded_rows x pitch.
template <class T>
inline void load_rows(T *to, int64_t pitch, const View &from, int64_t rows, int64_t columns, int64_t padded_rows) {
    with_dtype(from.dtype, [&](auto *type) {
        using S = std::remove_pointer_t<decltype(type)>;
        for (int64_t r = 0; r < rows; ++r) {
            const S *source = static_cast<const S *>(from.data) + from.offset + r * from.row;
            T *row = to + r * pitch;
            if (from.column == 1) {
                for (int64_t c = 0; c < columns; ++c) row[c] = convert_in<T>(source[c]);
            } else {
                for (int64_t c = 0; c < columns; ++c) row[c] = convert_in<T>(source[c * from.column]);
            }
            for (int64_t c = columns; c < pitch; ++c) row[c] = T(0);
        }
    });
    for (int64_t i = rows * pitch; i < padded_rows * pitch; ++i) to[i] = T(0);
}

template <class T>
inline void store_rows(const View &to, const T *from, int64_t pitch, int64_t rows, int64_t columns) {
    with_dtype(to.dtype, [&](auto *type) {
        using D = std::remove_pointer_t<decltype(type)>;
        for (int64_t r = 0; r < rows; ++r) {
            D *target = static_cast<D *>(to.data) + to.offset + r * to.row;
            const T *row = from + r * pitch;
            if (to.column == 1) {
                for (int64_t c = 0; c < columns; ++c) target[c] = convert_out<D>(row[c]);
            } else {
                for (int64_t c = 0; c < columns; ++c) target[c * to.column] = convert_out<D>(row[c]);
            }
        }
    });
}

}  // namespace
}  // namespace cake_gdn::cpu
