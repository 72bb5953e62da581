// The store that mirrors ldmatrix (ptx/mma.cuh).
#pragma once

#include <cstdint>

namespace cake_gdn::cuda::ptx {

// Mirror of ldmatrix_transposed: four 8 x 8 matrices of 16-bit elements, lanes 8q..8q+7 give the row addresses of
// matrix q; register q of lane t goes to rows 2 (t % 4) and + 1 of column t / 4.
__device__ __forceinline__ void stmatrix_transposed(uint32_t address, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

}  // namespace cake_gdn::cuda::ptx
