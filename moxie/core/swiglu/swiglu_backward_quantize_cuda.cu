#include "moxie/core/quantize/quantize_kernel.cuh"
#include "moxie/core/swiglu/backends.h"
#include "moxie/core/swiglu/swiglu_source.cuh"

namespace moxie::cuda {

void swiglu_backward_quantize(const SwigluBackwardQuantizeArgs& args, const Panels& panels,
                              void* stream) {
  constexpr const char* kOp = "swiglu_backward_quantize";
  const int64_t width = panels.cols / 2;
  const auto start = [&](const auto& source) {
    launch_quantize(kOp, args.forms, panels, source, stream);
  };
  if (args.h.format == Format::kF32) {
    start(SwigluBackwardElements<float>{{},
                                        static_cast<const float*>(args.da.data),
                                        static_cast<const float*>(args.h.data),
                                        width});
    return;
  }
  const auto *da = static_cast<const bf16*>(args.da.data),
             *h = static_cast<const bf16*>(args.h.data);
  if (width % kTileCols == 0 && are_rows_aligned(da, width, kFragment) &&
      are_rows_aligned(h, width, kFragment) && are_forms_aligned(args.forms) &&
      fits_here<SwigluBackwardSource>(kOp))
    start(SwigluBackwardSource{da, h, width});
  else
    start(SwigluBackwardElements<bf16>{{}, da, h, width});
}

}  // namespace moxie::cuda
