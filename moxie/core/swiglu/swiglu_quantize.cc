#include "moxie/core/swiglu/swiglu_quantize.h"

#include "moxie/core/base/check.h"
#include "moxie/core/base/dispatch.h"
#include "moxie/core/swiglu/backends.h"

namespace moxie {
namespace {

Shape check_h(const char* op, const ConstFloatView& h) {
  MOXIE_CHECK(h.shape.dims == 2 && h.dim(1) % 2 == 0, op,
              ": h must be [rows, 2 * hidden_dim], got ", h.shape);
  return {h.dim(0), h.dim(1) / 2};
}

}  // namespace

void swiglu_quantize(const SwigluQuantizeArgs& args, const Exec& exec) {
  constexpr const char* kOp = "swiglu_quantize";
  const Panels panels = check_forms(kOp, check_h(kOp, args.h), args.forms, exec.backend);
  check_weights(kOp, args.weights, args.h.dim(0), exec.backend);
  dispatch(
      kOp, exec, [&] { ref::swiglu_quantize(args); },
      [&] { cpu::swiglu_quantize(args, panels, exec); },
      [&](auto stream) { cuda::swiglu_quantize(args, panels, stream); });
}

void swiglu_backward_quantize(const SwigluBackwardQuantizeArgs& args, const Exec& exec) {
  constexpr const char* kOp = "swiglu_backward_quantize";
  check_shape(kOp, "da", args.da.shape, check_h(kOp, args.h));
  MOXIE_CHECK(args.da.format == args.h.format, kOp, ": da must be ", name(args.h.format),
              " as h, got ", name(args.da.format));
  const Panels panels = check_forms(kOp, args.h.shape, args.forms, exec.backend);
  check_weights(kOp, args.weights, args.da.shape, exec.backend);
  dispatch(
      kOp, exec, [&] { ref::swiglu_backward_quantize(args); },
      [&] { cpu::swiglu_backward_quantize(args, panels, exec); },
      [&](auto stream) { cuda::swiglu_backward_quantize(args, panels, stream); });
}

}  // namespace moxie
