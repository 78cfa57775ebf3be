#include "moxie/core/quantize/quantize_kernel.cuh"
#include "moxie/core/swiglu/backends.h"
#include "moxie/core/swiglu/swiglu_source.cuh"

namespace moxie::cuda {

void swiglu_quantize(const SwigluQuantizeArgs& args, const Panels& panels, void* stream) {
  const auto start = [&](const auto& source) {
    launch_quantize("swiglu_quantize", args.forms, panels, source, stream);
  };
  if (args.h.format == Format::kF32) {
    start(SwigluSource<float, false>{{}, static_cast<const float*>(args.h.data), panels.cols});
    return;
  }
  const auto* h = static_cast<const bf16*>(args.h.data);
  with_alignment(are_rows_aligned(h, panels.cols, kFragment) && are_forms_aligned(args.forms),
                 [&]<bool kAligned>() {
                   start(SwigluSource<bf16, kAligned>{{}, h, panels.cols});
                 });
}

}  // namespace moxie::cuda
