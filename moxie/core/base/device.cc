#include "moxie/core/base/device.h"

#include "moxie/core/base/exec.h"

namespace moxie {

namespace cuda {  // device_cuda.cu
int compute_capability(int device);
int num_multiprocessors(int device);
}  // namespace cuda

int compute_capability([[maybe_unused]] int device) {
  if constexpr (kHasCuda) return cuda::compute_capability(device);
  return 0;
}

int num_multiprocessors([[maybe_unused]] int device) {
  if constexpr (kHasCuda) return cuda::num_multiprocessors(device);
  return 0;
}

}  // namespace moxie
