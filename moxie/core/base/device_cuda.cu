#include <atomic>

#include "moxie/core/base/cuda.cuh"

namespace moxie::cuda {
namespace {

// Whether there is a device; a negative one becomes the current one.
bool has_device(int& device) {
  if (device >= 0 || cudaGetDevice(&device) == cudaSuccess) return true;
  cudaGetLastError();  // that there is none is an answer
  return false;
}

}  // namespace

int compute_capability(int device) {
  if (!has_device(device)) return 0;
  int major = 0, minor = 0;
  MOXIE_CUDA_CHECK("compute_capability",
                   cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  MOXIE_CUDA_CHECK("compute_capability",
                   cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  return major * 10 + minor;
}

int num_multiprocessors(int device) {
  if (!has_device(device)) return 0;
  // Every launch asks, and a device never changes: what the driver said once is kept.
  constexpr int kKept = 64;
  static std::atomic<int> kept[kKept];
  if (device < kKept)
    if (const int count = kept[device].load(std::memory_order_relaxed)) return count;
  int count = 0;
  MOXIE_CUDA_CHECK("num_multiprocessors",
                   cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  if (device < kKept) kept[device].store(count, std::memory_order_relaxed);
  return count;
}

}  // namespace moxie::cuda
