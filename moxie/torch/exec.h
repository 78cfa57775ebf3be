// Where an op runs: on a CPU in torch's own threads, on a GPU in the current stream of the tensor's
// device.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>

#include "moxie/core/base/exec.h"

namespace moxie::ops {

// While it lives, `device` is current and autograd is off, so that copies of arguments that an op
// makes are not recorded.
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
