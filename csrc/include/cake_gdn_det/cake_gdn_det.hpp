// cake_gdn_det for C++17: the C interface with exceptions and owned scratch. Header only.
//
//     cake_gdn_problem p = cake_gdn::problem();
//     p.B = 1, p.T = T, ...;
//     p.q = cake_gdn::contiguous(q, {1, T, H, K});
//     cake_gdn::Workspace scratch;
//     cake_gdn::forward(p, scratch);
//
// Everything else is as cake_gdn_det.h says. Memory of tensors is always the caller's.
#ifndef CAKE_GDN_DET_HPP
#define CAKE_GDN_DET_HPP

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "cake_gdn_det/cake_gdn_det.h"

namespace cake_gdn {

// A call that did not succeed: what() is the library's message.
class error : public std::runtime_error {
public:
    error(cake_gdn_status status, const std::string &message) : std::runtime_error(message), status_(status) {}
    cake_gdn_status status() const noexcept { return status_; }

private:
    cake_gdn_status status_;
};

inline void check(cake_gdn_status status) {
    if (status != CAKE_GDN_OK) throw error(status, cake_gdn_last_error());
}

// Throws when the loaded library is not of this header's version; worth one call at a program's start.
inline void check_abi() {
    if (cake_gdn_abi_version() == CAKE_GDN_ABI_VERSION) return;
    throw error(CAKE_GDN_INTERNAL_ERROR, "libcake_gdn_det has ABI version " + std::to_string(cake_gdn_abi_version()) +
                                             ", the header has " + std::to_string(CAKE_GDN_ABI_VERSION));
}

// An empty problem of this header's size, for one thread.
inline cake_gdn_problem problem() {
    cake_gdn_problem p{};
    p.struct_size = sizeof p;
    p.num_threads = 1;
    return p;
}

// The dtype of a C++ element type. bf16 and fp16 have no type in C++17: name their dtype.
template <class T>
constexpr cake_gdn_dtype dtype_of() {
    using E = std::remove_cv_t<T>;
    static_assert(std::is_same_v<E, float> || std::is_same_v<E, double> || std::is_same_v<E, int32_t> ||
                      std::is_same_v<E, int64_t>,
                  "name the dtype of this element type");
    if constexpr (std::is_same_v<E, float>) return CAKE_GDN_FP32;
    if constexpr (std::is_same_v<E, double>) return CAKE_GDN_FP64;
    if constexpr (std::is_same_v<E, int32_t>) return CAKE_GDN_INT32;
    return CAKE_GDN_INT64;
}

// A view with given strides in elements, one for each dimension, at most four. An input is never written, so a
// pointer to const is accepted.
inline cake_gdn_tensor strided(const void *data, cake_gdn_dtype dtype, std::initializer_list<int64_t> strides) {
    if (strides.size() > 4) throw std::invalid_argument("cake_gdn::strided: at most four dimensions");
    cake_gdn_tensor tensor{};
    tensor.data = const_cast<void *>(data);
    tensor.dtype = dtype;
    std::size_t i = 0;
    for (const int64_t stride : strides) tensor.stride[i++] = stride;
    return tensor;
}

// A row-major view of a shape, at most four dimensions.
inline cake_gdn_tensor contiguous(const void *data, cake_gdn_dtype dtype, std::initializer_list<int64_t> shape) {
    cake_gdn_tensor tensor = strided(data, dtype, shape);
    int64_t stride = 1;
    for (std::size_t i = shape.size(); i-- > 0;) {
        const int64_t size = shape.begin()[i];
        tensor.stride[i] = stride;
        stride *= size;
    }
    return tensor;
}
template <class T>
cake_gdn_tensor contiguous(const T *data, std::initializer_list<int64_t> shape) {
    return contiguous(data, dtype_of<T>(), shape);
}

inline std::size_t workspace_size(const cake_gdn_problem &p, cake_gdn_direction direction) {
    std::size_t bytes = 0;
    check(cake_gdn_workspace_size(&p, direction, &bytes));
    return bytes;
}

// Host scratch for the CPU backend. Grows to the largest call it served; one at a time may use it.
class Workspace {
public:
    void *reserve(std::size_t bytes) {
        const std::size_t lines = (bytes + sizeof(Line) - 1) / sizeof(Line);
        if (lines > lines_.size()) {
            lines_.clear();  // nothing in it outlives a call: do not copy it
            lines_.resize(lines);
        }
        return lines_.data();
    }

private:
    struct alignas(64) Line {
        unsigned char bytes[64];
    };
    std::vector<Line> lines_;
};

namespace detail {
inline std::size_t host_scratch(const cake_gdn_problem &p, cake_gdn_direction direction) {
    if (p.backend != CAKE_GDN_CPU) {
        throw error(CAKE_GDN_INVALID_ARGUMENT,
                    "cake_gdn::Workspace is host memory; give device scratch for this backend");
    }
    return workspace_size(p, direction);
}
}  // namespace detail

// On the CPU, with scratch from `scratch`.
inline void forward(const cake_gdn_problem &p, Workspace &scratch) {
    const std::size_t bytes = detail::host_scratch(p, CAKE_GDN_FORWARD);
    check(cake_gdn_forward(&p, scratch.reserve(bytes), bytes, nullptr));
}
inline void backward(const cake_gdn_problem &p, Workspace &scratch) {
    const std::size_t bytes = detail::host_scratch(p, CAKE_GDN_BACKWARD);
    check(cake_gdn_backward(&p, scratch.reserve(bytes), bytes, nullptr));
}

// On any backend, with the caller's scratch of at least workspace_size() bytes and stream.
inline void forward(const cake_gdn_problem &p, void *workspace, std::size_t bytes, void *stream) {
    check(cake_gdn_forward(&p, workspace, bytes, stream));
}
inline void backward(const cake_gdn_problem &p, void *workspace, std::size_t bytes, void *stream) {
    check(cake_gdn_backward(&p, workspace, bytes, stream));
}

}  // namespace cake_gdn

#endif  // CAKE_GDN_DET_HPP
