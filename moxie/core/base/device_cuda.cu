#include "moxie/core/base/cuda.cuh"

namespace moxie::cuda {

int compute_capability(int device) {
  if (device < 0 && cudaGetDevice(&device) != cudaSuccess) {
    cudaGetLastError();  // that there is none is an answer
    return 0;
  }
  int major = 0, minor = 0;
  MOXIE_CUDA_CHECK("compute_capability",
                   cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  MOXIE_CUDA_CHECK("compute_capability",
                   cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  return major * 10 + minor;
}

}  // namespace moxie::cuda
