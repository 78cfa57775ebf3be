// wgmma: one warpgroup multiplies a 64 x 32 tile of A with a 32 x n tile of B, both e4m3, K-major
// and in 128-byte swizzled shared memory, into f32 registers.
#pragma once

#include <cstdint>

#include "moxie/core/ptx/mbarrier.cuh"

namespace moxie::ptx {

// The low word of an operand's descriptor. Its address is in units of 16 bytes, so that adding
// bytes / 16 moves along K or down the rows. The operand is K-major with rows of 128 bytes,
// swizzled as TMA writes them; smem must be aligned to 1024.
inline constexpr int kDescriptorUnit = 16;
__device__ __forceinline__ uint32_t wgmma_descriptor_low(const void* smem) {
  constexpr uint32_t kLeading = 1 << 16;  // not used by swizzled K-major operands
  return kLeading | ((smem_address(smem) & 0x3ffff) >> 4);
}
// Adds the high word, which is the same for all operands. The swizzle pattern is eight rows, 1024
// bytes, which is the stride between groups of eight rows.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t operand) {
  constexpr uint32_t kSwizzle128 = 1u << 30, kStride = 1024 >> 4;
  return uint64_t{kSwizzle128 | kStride} << 32 | operand;
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving reads of an accumulator above the wait for it.
template <int kCount>
__device__ __forceinline__ void keep_in_registers(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Zeroes registers at this point. Plain assignments would be hoisted by the compiler to a place
// where they are not needed yet.
template <int kCount>
__device__ __forceinline__ void clear_registers(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(d[i]));
}

// d = A * B + (accumulate ? d : 0). Of the 16 rows of its warp, thread t of the warpgroup holds
// rows t / 4 % 8 and t / 4 % 8 + 8. d[4j] and d[4j + 1] are columns 8j + t % 4 * 2 and the next one
// of the first row; d[4j + 2] and d[4j + 3] are the same columns of the second row.
__device__ __forceinline__ void wgmma_m64n128k32(float (&d)[64], uint32_t a, uint32_t b,
                                                 bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, "
      "%56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1;\n"
      "}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63])
      : "l"(wgmma_descriptor(a)), "l"(wgmma_descriptor(b)), "r"(static_cast<int32_t>(accumulate)));
}

}  // namespace moxie::ptx
