#include "moxie/core/base/device.h"

#include "moxie/core/base/exec.h"

namespace moxie {

namespace cuda {
int compute_capability(int device);  // device_cuda.cu
}

int compute_capability(int device) {
  if constexpr (kHasCuda) return cuda::compute_capability(device);
  (void)device;
  return 0;
}

}  // namespace moxie
