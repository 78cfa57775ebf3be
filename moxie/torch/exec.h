// Where an op runs: torch's own threads on a CPU, the current stream of the tensor's device on a
// GPU.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>

#include "moxie/core/base/exec.h"

namespace moxie::ops {

// For as long as it lives, `device` is current and autograd does not record: the copies that an op
// makes of its arguments are its own business.
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
