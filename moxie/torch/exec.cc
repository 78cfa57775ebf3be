#include "moxie/torch/exec.h"

#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "moxie/core/base/math.h"

namespace moxie::ops {
namespace {

class TorchThreads final : public Parallel {
 public:
  void run(int64_t count, int64_t grain, const Body& body) override {
    // at::parallel_for runs over pieces of one grain each, because its ranges of single items may
    // be slightly shorter than its grain.
    const int64_t pieces = max<int64_t>(count / max<int64_t>(grain, 1), 1);
    const int64_t size = count / pieces;
    at::parallel_for(0, pieces, 1, [&](int64_t begin, int64_t end) {
      body(begin * size, end == pieces ? count : end * size);
    });
  }
};

TorchThreads torch_threads;  // one for all calls: it has no state

}  // namespace

DeviceScope::DeviceScope(c10::Device device) {
  if (device.is_cpu()) {
    exec_ = {.backend = Backend::kCpu, .parallel = &torch_threads};
    return;
  }
  exec_ = {.backend = Backend::kCuda};
  if constexpr (kHasCuda) {
    // Gets the stream through torch's device interface, which needs no CUDA headers of torch.
    guard_.reset_device(device);
    exec_.stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
  }
}

}  // namespace moxie::ops
