// stmatrix: stores the fragments that wgmma leaves in registers as rows of shared memory.
#pragma once

#include <cstdint>

#include "moxie/core/ptx/mbarrier.cuh"

namespace moxie::ptx {

// Stores four 8 x 8 matrices of 16-bit values: lane l gives the address of row l % 8 of matrix l /
// 8.
__device__ __forceinline__ void stmatrix_x4(void* smem, const uint32_t (&pairs)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_address(smem)),
      "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
      : "memory");
}

}  // namespace moxie::ptx
