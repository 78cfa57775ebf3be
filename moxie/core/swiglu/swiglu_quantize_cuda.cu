#include "moxie/core/quantize/quantize_kernel.cuh"
#include "moxie/core/swiglu/backends.h"
#include "moxie/core/swiglu/swiglu_source.cuh"

namespace moxie::cuda {

void swiglu_quantize(const SwigluQuantizeArgs& args, const Panels& panels, void* stream) {
  const auto start = [&](const auto& source) {
    launch_quantize("swiglu_quantize", args.forms, panels, source, stream);
  };
  const auto start_with = [&]<class T, bool kAligned>(const T* h) {
    const WeightParams of = weight_params(args.weights);
    if (args.weights)
      start(SwigluSource<T, kAligned, Weighting::kByRow>{{}, h, panels.cols, of, nullptr});
    else
      start(SwigluSource<T, kAligned, Weighting::kNone>{{}, h, panels.cols, of, nullptr});
  };
  if (args.h.format == Format::kF32)
    return start_with.template operator()<float, false>(static_cast<const float*>(args.h.data));
  const auto* h = static_cast<const bf16*>(args.h.data);
  with_alignment(are_rows_aligned(h, panels.cols, kFragment) && are_forms_aligned(args.forms),
                 [&]<bool kAligned>() { start_with.template operator()<bf16, kAligned>(h); });
}

}  // namespace moxie::cuda
