// Shared memory by 32-bit addresses, and named barriers.
#pragma once

#include <cstdint>

namespace cake_gdn::cuda::ptx {

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t bits) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(bits) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, const uint4 &bits) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(bits.x), "r"(bits.y), "r"(bits.z),
                 "r"(bits.w)
                 : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, float2 x) {
    asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(x.x), "f"(x.y) : "memory");
}
__device__ __forceinline__ uint32_t load_shared_32(uint32_t address) {
    uint32_t bits;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(bits) : "r"(address) : "memory");
    return bits;
}
__device__ __forceinline__ uint4 load_shared_128(uint32_t address) {
    uint4 bits;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "r"(address)
                 : "memory");
    return bits;
}

// Barrier `id` (1 to 15; 0 is __syncthreads) among the `threads` of whole warps that call it.
__device__ __forceinline__ void barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace cake_gdn::cuda::ptx
