#include "moxie/core/quantize/quantize_kernel.cuh"
#include "moxie/core/swiglu/backends.h"
#include "moxie/core/swiglu/swiglu_source.cuh"

namespace moxie::cuda {

void swiglu_quantize(const SwigluQuantizeArgs& args, const Panels& panels, void* stream) {
  const auto start = [&](const auto& source) {
    launch_quantize("swiglu_quantize", args.forms, panels, source, stream);
  };
  const auto start_with = [&]<class Glu, bool kAligned>(const ElementOf<Glu>* h) {
    const WeightParams of = weight_params(args.weights);
    if (args.weights)
      start(SwigluSource<Glu, kAligned, Weighting::kByRow>{{}, h, panels.cols, of, nullptr});
    else
      start(SwigluSource<Glu, kAligned, Weighting::kNone>{{}, h, panels.cols, of, nullptr});
  };
  with_glu(args.h.format, args.activation, [&]<class Glu>() {
    const auto* h = static_cast<const ElementOf<Glu>*>(args.h.data);
    if constexpr (sizeof(ElementOf<Glu>) == 4)
      start_with.template operator()<Glu, false>(h);
    else
      with_alignment(are_rows_aligned(h, panels.cols, kFragment) && are_forms_aligned(args.forms),
                     [&]<bool kAligned>() { start_with.template operator()<Glu, kAligned>(h); });
  });
}

}  // namespace moxie::cuda
