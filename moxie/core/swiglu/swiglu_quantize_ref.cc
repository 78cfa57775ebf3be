// The definition of the fused ops: swiglu, or its gradient, then quantize.
#include "moxie/core/format/values.h"
#include "moxie/core/swiglu/backends.h"

namespace moxie::ref {
namespace {

const Exec kRef{.backend = Backend::kRef};

}  // namespace

void swiglu_quantize(const SwigluQuantizeArgs& args) {
  const Values a(args.h.format, {args.h.dim(0), args.h.dim(1) / 2});
  moxie::swiglu({.h = args.h, .a = a.view, .weights = args.weights, .activation = args.activation},
                kRef);
  moxie::quantize(args_of(a.in(), args.forms), kRef);
}

void swiglu_backward_quantize(const SwigluBackwardQuantizeArgs& args) {
  const Values dh(args.h.format, args.h.shape);
  moxie::swiglu_backward({.da = args.da,
                          .h = args.h,
                          .dh = dh.view,
                          .weights = args.weights,
                          .activation = args.activation},
                         kRef);
  moxie::quantize(args_of(dh.in(), args.forms), kRef);
  if (!args.weights) return;
  const auto& [of, dweights, workspace] = *args.weights;
  for (int64_t r = covered_rows(args); r < args.da.dim(0); ++r)
    dweights.data[of.slot_of.data[r]] = 0;
}

}  // namespace moxie::ref
