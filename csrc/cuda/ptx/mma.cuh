// Tensor-core products of one warp (mma.sync m16n8k16, fp32 accumulation) and the loads of their operands (ldmatrix).
// The only inline assembly of the matrix path; sm_90a, sm_100a, sm_103a and sm_107a all execute it.
//
// Registers of lane t, r = t / 4, c = 2 (t % 4); pairs are (low half, high half):
//   A (16 x 16): a0 = (r, c..c+1), a1 = (r + 8, c..), a2 = (r, c + 8..), a3 = (r + 8, c + 8..)
//   B (16 x 8):  b0 = (k = c..c+1, n = r), b1 = (k = c + 8.., n = r)
//   D (16 x 8):  d0, d1 = (r, c), (r, c + 1); d2, d3 = (r + 8, c), (r + 8, c + 1)
// D columns 16j..16j+15 of two neighbouring tiles, packed to 16 bits, are the A operand of k step j.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace cake_gdn::cuda::ptx {

using bf16 = __nv_bfloat16;
using fp16 = __half;

// Generic address of shared memory -> its 32-bit address in the shared window.
__device__ __forceinline__ uint32_t shared_address(const void *p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

template <class E>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (sizeof(E) == 2 && __is_same(E, bf16)) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// Four 8 x 8 matrices; lanes 8q..8q+7 give the row addresses of matrix q. Register q of lane t: row t / 4, columns
// 2 (t % 4) and + 1; transposed: rows and columns swapped.
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Two floats rounded to nearest, `low` in the low half.
template <class E>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t bits;
    if constexpr (__is_same(E, bf16)) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    }
    return bits;
}

template <class E>
__device__ __forceinline__ float2 unpack(uint32_t bits) {
    if constexpr (__is_same(E, bf16)) {
        return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
    } else {
        return __half22float2(*reinterpret_cast<const __half2 *>(&bits));
    }
}

}  // namespace cake_gdn::cuda::ptx
