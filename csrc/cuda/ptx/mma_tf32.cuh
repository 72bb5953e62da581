// Tensor-core products of one warp with tf32 operands (mma.sync m16n8k8, fp32 accumulation), and fp32 values in two
// tf32 parts. tf32 is a float whose lower 13 bits do not count; sm_90a, sm_100a, sm_103a and sm_107a all execute it.
//
// Registers of lane t, r = t / 4, q = t % 4:
//   A (16 x 8): a0 = (r, q), a1 = (r + 8, q), a2 = (r, q + 4), a3 = (r + 8, q + 4)
//   B (8 x 8):  b0 = (k = q, n = r), b1 = (k = q + 4, n = r)
//   D (16 x 8): as in mma.cuh
#pragma once

#include <cstdint>

namespace cake_gdn::cuda::ptx {

__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// x = high + low: high the nearest tf32 (ties away from zero), low the exact rest, of which the tensor core drops what
// is below 2^-21 of x.
__device__ __forceinline__ void split_tf32(float x, uint32_t &high, uint32_t &low) {
    high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    low = __float_as_uint(x - __uint_as_float(high));
}

}  // namespace cake_gdn::cuda::ptx
