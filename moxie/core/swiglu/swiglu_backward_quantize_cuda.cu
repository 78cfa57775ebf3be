#include "moxie/core/quantize/quantize_kernel.cuh"
#include "moxie/core/swiglu/backends.h"
#include "moxie/core/swiglu/swiglu_source.cuh"
#include "moxie/core/swiglu/weight_gradient.cuh"

namespace moxie::cuda {
namespace {

constexpr const char* kOp = "swiglu_backward_quantize";

template <class Glu>
void quantize_as(const SwigluBackwardQuantizeArgs& args, const Panels& panels, void* stream) {
  using T = ElementOf<Glu>;
  const int64_t width = panels.cols / 2;
  const auto *da = static_cast<const T*>(args.da.data), *h = static_cast<const T*>(args.h.data);
  const WeightParams of = weight_params(args.weights);
  const auto start = [&](const auto& source) {
    launch_quantize(kOp, args.forms, panels, source, stream);
  };
  if constexpr (sizeof(T) == 2) {
    using Weighted = SwigluBackwardSource<Glu::kActivation, Weighting::kByRow>;
    using Plain = SwigluBackwardSource<Glu::kActivation, Weighting::kNone>;
    const bool tiled = width % kTileCols == 0 && are_rows_aligned(da, width, kFragment) &&
                       are_rows_aligned(h, width, kFragment) && are_forms_aligned(args.forms);
    if (tiled && fits_here<Weighted>(kOp)) {
      if (!args.weights) return start(Plain{.da = da, .h = h, .width = width});
      float* const sums = args.weights->workspace.data;  // of the rows that groups cover
      start(Weighted{.da = da, .h = h, .width = width, .of = of, .tile_sums = sums});
      return sum_weight_tiles(kOp, *args.weights, args.forms.offs, stream);
    }
  }
  start(SwigluBackwardElements<Glu>{{}, da, h, width, of, 0});
  if (args.weights)
    weight_gradient(kOp, {*args.weights, args.da, args.h, args.activation, args.forms.offs},
                    stream);
}

}  // namespace

void swiglu_backward_quantize(const SwigluBackwardQuantizeArgs& args, const Panels& panels,
                              void* stream) {
  with_glu(args.h.format, args.activation,
           [&]<class Glu>() { quantize_as<Glu>(args, panels, stream); });
}

}  // namespace moxie::cuda
