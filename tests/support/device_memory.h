// GPU memory for tests: an RAII buffer, and copies that wait for preceding kernels. In a build
// without CUDA, has_cuda_device() is false and everything else throws.
#pragma once

#include <cstddef>
#include <utility>

#include "moxie/core/base/check.h"
#ifdef MOXIE_CUDA
#include <cuda_runtime.h>
#endif

namespace moxie::testing {

#ifdef MOXIE_CUDA

inline void check_device(const char* what, cudaError_t status) {
  MOXIE_CHECK(status == cudaSuccess, what, ": ", cudaGetErrorString(status));
}

inline bool has_cuda_device() {
  static const bool found = [] {
    int count = 0;
    const bool ok = cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
    cudaGetLastError();  // forgets CUDA's last error: a machine without a driver is fine
    return ok;
  }();
  return found;
}

inline void* allocate_on_device(size_t bytes) {
  void* data = nullptr;
  if (bytes > 0) check_device("cudaMalloc", cudaMalloc(&data, bytes));
  return data;
}

inline void free_on_device(void* data) { cudaFree(data); }

inline void copy_to_device(void* to, const void* from, size_t bytes) {
  if (bytes > 0)
    check_device("copy to device", cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
}

inline void copy_to_host(void* to, const void* from, size_t bytes) {
  if (bytes > 0) check_device("copy to host", cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
}

#else

inline bool has_cuda_device() { return false; }
[[noreturn]] inline void* allocate_on_device(size_t) {
  fail("device memory: a build without CUDA");
}
inline void free_on_device(void*) {}
inline void copy_to_device(void*, const void*, size_t) {
  fail("device memory: a build without CUDA");
}
inline void copy_to_host(void*, const void*, size_t) {
  fail("device memory: a build without CUDA");
}

#endif

class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(size_t bytes) : data_(allocate_on_device(bytes)) {}
  ~DeviceBuffer() { free_on_device(data_); }
  DeviceBuffer(DeviceBuffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }

  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

}  // namespace moxie::testing
