// Dispatches an op with checked arguments to the backend that the caller chose.
#pragma once

#include <string_view>

#include "moxie/core/base/check.h"
#include "moxie/core/base/exec.h"

namespace moxie {

// Calls ref(), cpu() or cuda(exec.stream). cuda must be a generic lambda, [&](auto stream) { .. }:
// a build without CUDA never instantiates its body, so the kernels it names need not exist.
//   dispatch("requantize", exec, [&] { ref::requantize(args, panels); },
//            [&] { cpu::requantize(args, panels, exec); },
//            [&](auto stream) { cuda::requantize(args, panels, stream); });
template <class Ref, class Cpu, class Cuda>
void dispatch(std::string_view op, const Exec& exec, const Ref& ref, const Cpu& cpu,
              [[maybe_unused]] const Cuda& cuda) {
  switch (exec.backend) {
    case Backend::kRef: return ref();
    case Backend::kCpu: return cpu();
    case Backend::kCuda:
      if constexpr (kHasCuda) return cuda(exec.stream);
  }
  fail(op, ": this build of Moxie has no CUDA backend (configure with -DMOXIE_CUDA=ON)");
}

// Dispatches an op that has no cpu backend: for Backend::kCpu it runs ref.
template <class Ref, class Cuda>
void dispatch(std::string_view op, const Exec& exec, const Ref& ref, const Cuda& cuda) {
  dispatch(op, exec, ref, ref, cuda);
}

}  // namespace moxie
