#include <atomic>
#include <map>
#include <utility>

#include "moxie/core/base/cuda.cuh"

namespace moxie::cuda {
namespace {

// Replaces a negative index by that of the current device, and returns whether there is one. An
// index of 0 or above is taken as it is.
bool has_device(int& device) {
  if (device >= 0 || cudaGetDevice(&device) == cudaSuccess) return true;
  cudaGetLastError();  // having no device is not an error here
  return false;
}

// Caches a property per device: every launch asks for it, and it never changes.
class KeptByDevice {
 public:
  template <class Ask>
  int get(int device, Ask&& ask) {
    if (device >= kDevices) return ask();
    if (const int value = kept_[device].load(std::memory_order_relaxed)) return value;
    const int value = ask();
    kept_[device].store(value, std::memory_order_relaxed);
    return value;
  }

 private:
  static constexpr int kDevices = 64;
  std::atomic<int> kept_[kDevices] = {};
};

int attribute(const char* op, cudaDeviceAttr which, int device) {
  int value = 0;
  MOXIE_CUDA_CHECK(op, cudaDeviceGetAttribute(&value, which, device));
  return value;
}

}  // namespace

int compute_capability(int device) {
  constexpr const char* kOp = "compute_capability";
  static KeptByDevice kept;
  if (!has_device(device)) return 0;
  return kept.get(device, [&] {
    return attribute(kOp, cudaDevAttrComputeCapabilityMajor, device) * 10 +
           attribute(kOp, cudaDevAttrComputeCapabilityMinor, device);
  });
}

int num_multiprocessors(int device) {
  static KeptByDevice kept;
  if (!has_device(device)) return 0;
  return kept.get(device, [&] {
    return attribute("num_multiprocessors", cudaDevAttrMultiProcessorCount, device);
  });
}

void allow_shared(std::string_view op, const void* kernel, int bytes) {
  constexpr int kDefault = 48 << 10;  // bytes a kernel may use without asking
  if (bytes <= kDefault) return;
  int device = 0;
  MOXIE_CUDA_CHECK(op, cudaGetDevice(&device));
  // Remembers what was allowed, because cudaFuncSetAttribute takes half as long as a launch. Each
  // thread has its own map, to avoid a lock.
  thread_local std::map<std::pair<const void*, int>, int> allowed;
  int& most = allowed[{kernel, device}];
  if (bytes <= most) return;
  MOXIE_CUDA_CHECK(
      op, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  most = bytes;
}

}  // namespace moxie::cuda
