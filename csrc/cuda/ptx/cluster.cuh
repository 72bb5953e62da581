// Thread-block clusters: the barrier of all their threads, and reads of another block's shared memory.
#pragma once

#include <cstdint>

namespace cake_gdn::cuda::ptx {

// A barrier in two parts: what a thread of the cluster wrote before it arrived, every thread sees that has waited; after
// a relaxed arrival nothing is promised to be seen. A kernel launched without clusters has clusters of one block.
__device__ __forceinline__ void arrive_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void arrive_cluster_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Address in the cluster's shared memory of what lies at `shared` in block `rank` of the cluster.
__device__ __forceinline__ uint32_t cluster_address(uint32_t shared, uint32_t rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
    return address;
}

__device__ __forceinline__ float4 load_cluster_128(uint32_t address) {
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
}

}  // namespace cake_gdn::cuda::ptx
