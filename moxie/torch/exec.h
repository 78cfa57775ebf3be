// Where an op runs: on a CPU, torch's own threads; on a GPU, the current stream of the tensor's
// device.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>

#include "moxie/core/base/exec.h"

namespace moxie::ops {

// RAII: makes `device` current and disables autograd, so that copies of arguments inside an op are
// not recorded.
class DeviceScope {
 public:
  explicit DeviceScope(c10::Device device);
  const Exec& exec() const { return exec_; }

 private:
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  c10::OptionalDeviceGuard guard_;
  Exec exec_;
};

}  // namespace moxie::ops
