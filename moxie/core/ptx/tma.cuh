// TMA (bulk tensor copies): copies boxes of a tensor, described on the host (tensor_map.cuh), to or
// from shared memory. Loads complete on an mbarrier. Coordinates are innermost first.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "moxie/core/ptx/mbarrier.cuh"

namespace moxie::ptx {

__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads the box at (x, y) into the same place of every CTA of the cluster whose bit is set in
// `ctas`; the barrier of each CTA counts the bytes.
__device__ __forceinline__ void tma_load_2d_multicast(const CUtensorMap* map, uint64_t* barrier,
                                                      void* smem, int32_t x, int32_t y,
                                                      uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(smem_address(smem)),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y), "h"(ctas)
      : "memory");
}

// Loads the box at (first, 0, 0, 0, last).
__device__ __forceinline__ void tma_load_5d(const CUtensorMap* map, uint64_t* barrier, void* smem,
                                            int32_t first, int32_t last) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %5, %5, %5, %4}], [%2];" ::"r"(smem_address(smem)),
      "l"(map), "r"(smem_address(barrier)), "r"(first), "r"(last), "r"(0)
      : "memory");
}

// Loads the box at (x, y), with an L2 policy (l2.cuh).
__device__ __forceinline__ void tma_load_2d(const CUtensorMap* map, uint64_t* barrier, void* smem,
                                            int32_t x, int32_t y, uint64_t l2_policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(smem_address(smem)),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y), "l"(l2_policy)
      : "memory");
}

// Prefetches the box at (x, y) to L2.
__device__ __forceinline__ void tma_prefetch_2d(const CUtensorMap* map, int32_t x, int32_t y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(x),
               "r"(y)
               : "memory");
}

// Stores shared memory to the box at (x, y). Threads that wrote it must have called
// fence_proxy_async() afterwards.
__device__ __forceinline__ void tma_store_2d(const CUtensorMap* map, const void* smem, int32_t x,
                                             int32_t y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
      "r"(smem_address(smem)), "r"(x), "r"(y)
      : "memory");
}

__device__ __forceinline__ void tma_store_3d(const CUtensorMap* map, const void* smem, int32_t x,
                                             int32_t y, int32_t z, uint64_t l2_policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint"
      " [%0, {%2, %3, %4}], [%1], %5;" ::"l"(map),
      "r"(smem_address(smem)), "r"(x), "r"(y), "r"(z), "l"(l2_policy)
      : "memory");
}

__device__ __forceinline__ void bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's groups of stores still read shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Orders ordinary writes to shared memory before TMA's reads of it.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace moxie::ptx
