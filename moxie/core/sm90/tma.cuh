// The bulk tensor copy engine: boxes of a tensor described on the host (tensor_map.h) into shared
// memory, completing on an mbarrier. Coordinates are innermost first.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "moxie/core/sm90/mbarrier.cuh"

namespace moxie::sm90 {

__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tma_load_3d(const CUtensorMap* map, uint64_t* barrier, void* smem,
                                            int32_t x, int32_t y, int32_t z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(smem_address(smem)),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// Into the same place of every CTA of the cluster whose bit is set in ctas; each one's barrier
// counts the bytes.
__device__ __forceinline__ void tma_load_3d_multicast(const CUtensorMap* map, uint64_t* barrier,
                                                      void* smem, int32_t x, int32_t y, int32_t z,
                                                      uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(smem_address(smem)),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y), "r"(z), "h"(ctas)
      : "memory");
}

// A run of bytes: both addresses and the size are multiples of 16.
__device__ __forceinline__ void bulk_load(void* smem, const void* global, uint32_t bytes,
                                          uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem_address(smem)),
      "l"(global), "r"(bytes), "r"(smem_address(barrier))
      : "memory");
}

// Shared memory to a box of the tensor. The writes to shared memory come before a
// fence_proxy_async() of each writing thread.
__device__ __forceinline__ void tma_store_3d(const CUtensorMap* map, const void* smem, int32_t x,
                                             int32_t y, int32_t z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::
                   "l"(map),
               "r"(smem_address(smem)), "r"(x), "r"(y), "r"(z)
               : "memory");
}

__device__ __forceinline__ void bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until at most kPending groups of stores still read shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Orders ordinary writes to shared memory before the copy engine's or tensor cores' reads of it.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace moxie::sm90
