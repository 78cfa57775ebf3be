// The barrier of all ranks as kernels call it.
#pragma once

#include "moxie/core/base/cuda.cuh"
#include "moxie/core/exchange/barrier.cuh"
#include "moxie/core/exchange/exchange.h"
#include "moxie/core/ptx/system_memory.cuh"

namespace moxie::cuda {

struct SystemWords {
  __device__ static void store_release(uint64_t* to, uint64_t word) {
    ptx::store_release_system(to, word);
  }
  __device__ static uint64_t load_acquire(const uint64_t* from) {
    return ptx::load_acquire_system(from);
  }
  __device__ static uint64_t time() { return ptx::global_time(); }
};

__device__ inline void meet(const Peers& peers, Step step) { meet_by<SystemWords>(peers, step); }

struct MeetParams {
  Peers peers;
  Step step;
};
void launch_meet(const char* op, const SharedMemory& memory, Step step, void* stream);

}  // namespace moxie::cuda
