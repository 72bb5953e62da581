// Failures of the GPU backend on their way to the C boundary. Only in CUDA builds.
#pragma once

#include "api/checks.hpp"
#include "cuda/device.hpp"

namespace cake_gdn::api {

// Runs f, with the backend's errors turned into the boundary's.
template <class F>
void on_device(F &&f) {
    try {
        f();
    } catch (const cuda::Error &error) {
        throw Failure(error.status, error.what());
    }
}

}  // namespace cake_gdn::api
