// Hints for the L2 cache: prefetch and eviction policy.
#pragma once

#include <cstdint>

namespace moxie::ptx {

// Prefetches the line of this address to L2; the address must be inside an allocation.
__device__ __forceinline__ void prefetch_l2(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

// The evict_last policy: other lines are evicted first. It is for one part of a 256-byte line if
// the other part is accessed soon, so that memory is accessed once for both.
__device__ __forceinline__ uint64_t keep_in_l2() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void store_kept(void* to, const uint4& v) {
  asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(v.x),
               "r"(v.y), "r"(v.z), "r"(v.w), "l"(keep_in_l2())
               : "memory");
}
__device__ __forceinline__ void store_kept(void* to, uint8_t v) {
  asm volatile("st.global.L2::cache_hint.b8 [%0], %1, %2;" ::"l"(to), "r"(uint32_t{v}),
               "l"(keep_in_l2())
               : "memory");
}

// Copies eight bytes to shared memory with cp.async; __pipeline_commit() closes the group.
// Prefetches the whole 256-byte line to L2.
__device__ __forceinline__ void copy_async_8(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global.L2::256B [%0], [%1], 8;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
}

}  // namespace moxie::ptx
