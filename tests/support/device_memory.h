// GPU memory for tests. In a build without CUDA there is no device, and nothing here is called.
#pragma once

#include <cstddef>
#include <utility>

#ifdef MOXIE_CUDA
#include <cuda_runtime_api.h>
#endif

#include "moxie/core/base/check.h"

namespace moxie::testing {

#ifdef MOXIE_CUDA
inline void check_cuda(cudaError_t error, const char* what) {
  MOXIE_CHECK(error == cudaSuccess, what, ": ", cudaGetErrorString(error));
}

inline bool has_cuda_device() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}
inline void* device_malloc(size_t bytes) {
  void* data = nullptr;
  check_cuda(cudaMalloc(&data, bytes ? bytes : 1), "cudaMalloc");
  return data;
}
inline void device_free(void* data) { cudaFree(data); }
inline void copy_to_device(void* to, const void* from, size_t bytes) {
  check_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "copy_to_device");
}
// Waits for the work before it, so an error of a kernel shows up here.
inline void copy_to_host(void* to, const void* from, size_t bytes) {
  check_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "copy_to_host");
}
#else
inline bool has_cuda_device() { return false; }
inline void* device_malloc(size_t) { fail("device_malloc: a build without CUDA"); }
inline void device_free(void*) {}
inline void copy_to_device(void*, const void*, size_t) { fail("copy_to_device: no CUDA"); }
inline void copy_to_host(void*, const void*, size_t) { fail("copy_to_host: no CUDA"); }
#endif

class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(size_t bytes) : data_(device_malloc(bytes)) {}
  DeviceBuffer(DeviceBuffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }
  ~DeviceBuffer() {
    if (data_) device_free(data_);
  }

  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

}  // namespace moxie::testing
