// Asynchronous copies from global to shared memory (cp.async), 16 bytes a thread, and prefetches into L2.
#pragma once

#include <cstdint>

namespace cake_gdn::cuda::ptx {

// Copies `bytes` (0 to 16) and fills the rest of the 16 with zeros; with 0 bytes `source` is not read.
__device__ __forceinline__ void copy_async(uint32_t shared, const void *source, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(source), "r"(bytes) : "memory");
}

// Asks for the line of global memory around an address to be brought into L2.
__device__ __forceinline__ void prefetch(const void *source) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(source) : "memory");
}

// Closes the group of this thread's copies since the last one.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `Pending` of this thread's groups are unfinished. A barrier makes the data everybody's.
template <int Pending>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

}  // namespace cake_gdn::cuda::ptx
