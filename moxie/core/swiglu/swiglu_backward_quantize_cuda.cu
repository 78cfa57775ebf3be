#include "moxie/core/quantize/quantize_kernel.cuh"
#include "moxie/core/swiglu/backends.h"
#include "moxie/core/swiglu/swiglu_source.cuh"
#include "moxie/core/swiglu/weight_gradient.cuh"

namespace moxie::cuda {

void swiglu_backward_quantize(const SwigluBackwardQuantizeArgs& args, const Panels& panels,
                              void* stream) {
  constexpr const char* kOp = "swiglu_backward_quantize";
  const int64_t width = panels.cols / 2;
  const auto start = [&](const auto& source) {
    launch_quantize(kOp, args.forms, panels, source, stream);
  };
  const WeightParams of = weight_params(args.weights);
  const auto start_elements = [&]<class T>(const T* da, const T* h) {
    start(SwigluBackwardElements<T>{{}, da, h, width, of, 0});
    if (args.weights)
      weight_gradient(kOp, {*args.weights, args.da, args.h, args.forms.offs}, stream);
  };
  if (args.h.format == Format::kF32)
    return start_elements(static_cast<const float*>(args.da.data),
                          static_cast<const float*>(args.h.data));
  const auto *da = static_cast<const bf16*>(args.da.data),
             *h = static_cast<const bf16*>(args.h.data);
  const bool tiled = width % kTileCols == 0 && are_rows_aligned(da, width, kFragment) &&
                     are_rows_aligned(h, width, kFragment) && are_forms_aligned(args.forms);
  if (!tiled || !fits_here<SwigluBackwardSource<Weighting::kByRow>>(kOp))
    return start_elements(da, h);
  if (!args.weights)
    return start(SwigluBackwardSource<Weighting::kNone>{.da = da, .h = h, .width = width});
  // No CTA has rows that no group covers.
  const View<float>& sums = args.weights->workspace;
  zero_async({.op = kOp, .stream = stream, .work = 0}, sums.data,
             numel(sums.shape) * int64_t{sizeof(float)});
  start(SwigluBackwardSource<Weighting::kByRow>{
      .da = da, .h = h, .width = width, .of = of, .tile_sums = sums.data});
  sum_weight_tiles(kOp, *args.weights, stream);
}

}  // namespace moxie::cuda
