// Errors and launches of CUDA kernels.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <limits>
#include <sstream>
#include <string_view>

#include "moxie/core/base/check.h"
#include "moxie/core/base/cta.cuh"
#include "moxie/core/base/math.h"

// MOXIE_CUDA_CHECK("quantize", cudaMemsetAsync(...)) throws DeviceError if the call fails, with the
// op and CUDA's message.
#define MOXIE_CUDA_CHECK(op, call) ::moxie::cuda::check_cuda(op, #call, call)

namespace moxie::cuda {

inline void check_cuda(std::string_view op, std::string_view call, cudaError_t status) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // clears the error, so that it does not surface in another library's call
  std::ostringstream message;
  message << op << ": " << call << " failed: " << cudaGetErrorString(status);
  throw DeviceError(message.str());
}

struct Launch {
  std::string_view op;  // for the error message
  void* stream;
  int64_t work;          // number of CTAs with work; work_index() numbers them
  int shared_bytes = 0;  // dynamic
  int threads = kThreads;
};

// Allows a kernel more dynamic shared memory than the default 48 KB.
void allow_shared(std::string_view op, const void* kernel, int bytes);

// Launches a kernel without synchronizing, so that it can be captured in a CUDA graph.
template <class Params>
void launch(const Launch& how, void (*kernel)(Params), const Params& params) {
  if (how.work == 0) return;
  allow_shared(how.op, reinterpret_cast<const void*>(kernel), how.shared_bytes);
  cudaLaunchConfig_t config{};
  // gridDim.x has the larger limit, 2^31 - 1; gridDim.y takes the rest.
  const int64_t width = min<int64_t>(how.work, std::numeric_limits<int>::max());
  config.gridDim.x = static_cast<unsigned>(width);
  config.gridDim.y = static_cast<unsigned>(ceil_div(how.work, width));
  config.blockDim.x = static_cast<unsigned>(how.threads);
  config.dynamicSmemBytes = static_cast<size_t>(how.shared_bytes);
  config.stream = static_cast<cudaStream_t>(how.stream);
  MOXIE_CUDA_CHECK(how.op, cudaLaunchKernelEx(&config, kernel, params));
}

inline void zero_async(const Launch& how, void* data, int64_t bytes) {
  if (bytes == 0) return;
  MOXIE_CUDA_CHECK(how.op, cudaMemsetAsync(data, 0, static_cast<size_t>(bytes),
                                           static_cast<cudaStream_t>(how.stream)));
}

// This CTA's number, from 0. The grid may have more CTAs than Launch::work: those whose number is
// not below it must return.
__device__ inline int64_t work_index() {
  return static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
}

// Returns a kernel's dynamic shared memory as the struct that describes what it holds.
template <class Storage>
__device__ Storage& shared_storage() {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  return *reinterpret_cast<Storage*>(shared_bytes);
}

}  // namespace moxie::cuda
