// Devices: what a plan and a launch may know about one, and the current-device guard.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

#include "cake_gdn_det/cake_gdn_det.h"

namespace cake_gdn::cuda {

// A failure on its way to the C boundary, where it becomes a status and a message.
class Error : public std::runtime_error {
public:
    Error(cake_gdn_status status, const std::string &message) : std::runtime_error(message), status(status) {}
    const cake_gdn_status status;
};

// Immutable facts of a device, read from the driver once.
struct Traits {
    int device;
    int capability;  // 10 * major + minor
    int multiprocessors;
    size_t shared_memory;  // largest dynamic shared memory of a block, bytes
};

// Traits of a device index. Throws Error for an index that names no device and when there is no usable driver.
const Traits &traits(int device);

// Makes a device current for the guard's life and restores the one that was. Costs one query when it already is.
class DeviceGuard {
public:
    explicit DeviceGuard(int device);
    ~DeviceGuard();
    DeviceGuard(const DeviceGuard &) = delete;
    DeviceGuard &operator=(const DeviceGuard &) = delete;

private:
    int previous_ = -1;  // -1: nothing to restore
};

}  // namespace cake_gdn::cuda
