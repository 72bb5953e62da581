#include "cuda/device.hpp"

#include <cuda_runtime_api.h>

#include <mutex>
#include <vector>

#include "cuda/launch.hpp"

namespace cake_gdn::cuda {

namespace {

struct Slot {
    std::once_flag once;
    Traits traits;
};

int device_count() {
    int count = 0;
    check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    return count;
}

int attribute(cudaDeviceAttr which, int device) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute", "device " + std::to_string(device));
    return value;
}

}  // namespace

const Traits &traits(int device) {
    // Neither initialiser is retained when it throws: a later call, say after a driver was loaded, tries again.
    static std::vector<Slot> slots(static_cast<size_t>(device_count()));
    if (device < 0 || device >= static_cast<int>(slots.size())) {
        throw Error(CAKE_GDN_INVALID_ARGUMENT, "device: got " + std::to_string(device) + ", this process sees " +
                                                   std::to_string(slots.size()) + " CUDA devices");
    }
    Slot &slot = slots[static_cast<size_t>(device)];
    std::call_once(slot.once, [&] {
        slot.traits.device = device;
        slot.traits.capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor, device) +
                                 attribute(cudaDevAttrComputeCapabilityMinor, device);
        slot.traits.multiprocessors = attribute(cudaDevAttrMultiProcessorCount, device);
        slot.traits.shared_memory = static_cast<size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    });
    return slot.traits;
}

DeviceGuard::DeviceGuard(int device) {
    int current = 0;
    check(cudaGetDevice(&current), "cudaGetDevice");
    if (current == device) return;
    check(cudaSetDevice(device), "cudaSetDevice", "device " + std::to_string(device));
    previous_ = current;
}

DeviceGuard::~DeviceGuard() {
    // It was current a moment ago, so this cannot fail for a reason that the caller could act on.
    if (previous_ >= 0) static_cast<void>(cudaSetDevice(previous_));
}

}  // namespace cake_gdn::cuda
