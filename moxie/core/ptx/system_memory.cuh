// Words that GPUs of one NVLink domain, or a GPU and its host, tell each other, and the clock that
// limits how long one waits for them.
#pragma once

#include <cstdint>

namespace moxie::ptx {

// Whatever this thread has seen written is visible to whoever acquires the word, on any GPU.
__device__ __forceinline__ void store_release_system(uint64_t* to, uint64_t word) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}
__device__ __forceinline__ uint64_t load_acquire_system(const uint64_t* from) {
  uint64_t word;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  return word;
}

// Nanoseconds; advances in steps of up to about a microsecond.
__device__ __forceinline__ uint64_t global_time() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

}  // namespace moxie::ptx
