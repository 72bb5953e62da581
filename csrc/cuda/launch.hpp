// Checked CUDA calls and kernel launches. No launch is made outside this file, and no result goes unread.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "cuda/device.hpp"

namespace cake_gdn::cuda {

// Throws Error(CAKE_GDN_DEVICE_ERROR) naming `what` and `where` unless `result` is a success.
inline void check(cudaError_t result, const char *what, const std::string &where = {}) {
    if (result == cudaSuccess) return;
    // The runtime remembers a failure; it has been reported here and must not surface in a later call.
    static_cast<void>(cudaGetLastError());
    throw Error(CAKE_GDN_DEVICE_ERROR, std::string(what) + (where.empty() ? "" : " (" + where + ")") + ": " +
                                           cudaGetErrorName(result) + ", " + cudaGetErrorString(result));
}

// What a failure message says about a launch. The text is made only when there is a failure.
template <class Text>
struct Site {
    const char *program;  // row of programs.def
    Text arguments;       // () -> the stage's arguments as text
};
template <class Text>
Site(const char *, Text) -> Site<Text>;

// Throws Error(CAKE_GDN_UNSUPPORTED) when this build has no code of `program` for the device.
void require_code(const char *program, const Traits &traits);

struct Shape {
    int64_t blocks;  // along x, the only grid dimension: y and z end at 65535
    int threads;     // of a block
    size_t shared_memory = 0;
    int cluster = 1;  // blocks of a cluster, neighbours along x; divides `blocks`
};

// Launches kernel(arguments...) on `stream`, whose device is current.
template <class Text, class... Parameters>
void launch(const Site<Text> &site, const Traits &traits, const Shape &shape, void *stream,
            void (*kernel)(Parameters...), Parameters... arguments) {
    const auto where = [&] {
        return std::string(site.program) + "(" + site.arguments() + "), grid " + std::to_string(shape.blocks) +
               ", block " + std::to_string(shape.threads) + ", shared memory " + std::to_string(shape.shared_memory) +
               (shape.cluster > 1 ? ", cluster " + std::to_string(shape.cluster) : "") + ", device " +
               std::to_string(traits.device);
    };
    if (shape.blocks < 1 || shape.blocks > INT32_MAX || shape.shared_memory > traits.shared_memory) {
        throw Error(CAKE_GDN_INTERNAL_ERROR, "launch outside the device's limits: " + where());
    }
    const void *entry = reinterpret_cast<const void *>(kernel);
    if (shape.shared_memory > 48 * 1024) {
        const cudaError_t result = cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                        static_cast<int>(shape.shared_memory));
        if (result != cudaSuccess) check(result, "cudaFuncSetAttribute", where());
    }
    void *pointers[] = {&arguments...};
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
    config.blockDim = dim3(static_cast<unsigned>(shape.threads));
    config.dynamicSmemBytes = shape.shared_memory;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &cluster;
    config.numAttrs = shape.cluster > 1 ? 1 : 0;
    const cudaError_t result = cudaLaunchKernelExC(&config, entry, pointers);
    if (result != cudaSuccess) check(result, "cudaLaunchKernelExC", where());
}

}  // namespace cake_gdn::cuda
