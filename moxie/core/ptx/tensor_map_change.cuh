// Tensor maps in global memory, changed by a kernel. All others are parameters of a kernel, made on
// the host (tensor_map.cuh).
#pragma once

#include <cuda.h>

#include <cstdint>

namespace moxie::ptx {

// Sets the size of the innermost dimension. TMA must not use the map before both fences below.
__device__ __forceinline__ void tensormap_set_size(CUtensorMap* map, uint32_t size) {
  asm volatile("tensormap.replace.tile.global_dim.global.b1024.b32 [%0], 0, %1;" ::"l"(
                   __cvta_generic_to_global(map)),
               "r"(size)
               : "memory");
}

// TMA reads maps through a cache of its own. release makes this thread's changes of maps visible,
// acquire makes TMA read this map again.
__device__ __forceinline__ void fence_tensormap_release() {
  asm volatile("fence.proxy.tensormap::generic.release.gpu;" ::: "memory");
}
__device__ __forceinline__ void fence_tensormap_acquire(const CUtensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

}  // namespace moxie::ptx
