#include "moxie/core/swiglu/swiglu.h"

#include "moxie/core/base/check.h"
#include "moxie/core/base/dispatch.h"
#include "moxie/core/layout/check_args.h"
#include "moxie/core/swiglu/backends.h"

namespace moxie {
namespace {

void check_h(const char* op, const ConstFloatView& h) {
  MOXIE_CHECK(h.shape.dims == 2 && h.dim(1) % 2 == 0, op,
              ": h must be [rows, 2 * hidden_dim], got ", h.shape);
}

void check_format(const char* op, const char* argument, Format format, Format expected) {
  MOXIE_CHECK(format == expected, op, ": ", argument, " must be ", name(expected), " as h, got ",
              name(format));
}

}  // namespace

void check_weights(const char* op, const std::optional<RowWeights>& weights, int64_t rows,
                   Backend backend) {
  if (!weights) return;
  check_shape(op, "weights", weights->weights.shape, {rows});
  check_shape(op, "slot_of", weights->slot_of.shape, {rows});
  if (backend == Backend::kCuda) return;  // kernels pull slots into range
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t slot = weights->slot_of.data[r];
    MOXIE_CHECK(slot >= 0 && slot < rows, op, ": slot_of must be 0 to ", rows - 1, ", got ", slot,
                " at ", r);
  }
}

void check_weights(const char* op, const std::optional<WeightGradient>& weights, const Shape& da,
                   Backend backend) {
  if (!weights) return;
  check_weights(op, weights->of, da[0], backend);
  check_shape(op, "dweights", weights->dweights.shape, {da[0]});
  if (backend == Backend::kCuda)
    check_shape(op, "workspace", weights->workspace.shape,
                {da[0], weight_gradient_tiles<int64_t>(da[1])});
}

void swiglu(const SwigluArgs& args, const Exec& exec) {
  check_h("swiglu", args.h);
  check_shape("swiglu", "a", args.a.shape, {args.h.dim(0), args.h.dim(1) / 2});
  check_format("swiglu", "a", args.a.format, args.h.format);
  check_weights("swiglu", args.weights, args.h.dim(0), exec.backend);
  dispatch(
      "swiglu", exec, [&] { ref::swiglu(args); }, [&] { cpu::swiglu(args, exec); },
      [&](auto stream) { cuda::swiglu(args, stream); });
}

void swiglu_backward(const SwigluBackwardArgs& args, const Exec& exec) {
  check_h("swiglu_backward", args.h);
  check_shape("swiglu_backward", "da", args.da.shape, {args.h.dim(0), args.h.dim(1) / 2});
  check_shape("swiglu_backward", "dh", args.dh.shape, args.h.shape);
  check_format("swiglu_backward", "da", args.da.format, args.h.format);
  check_format("swiglu_backward", "dh", args.dh.format, args.h.format);
  check_weights("swiglu_backward", args.weights, args.da.shape, exec.backend);
  dispatch(
      "swiglu_backward", exec, [&] { ref::swiglu_backward(args); },
      [&] { cpu::swiglu_backward(args, exec); },
      [&](auto stream) { cuda::swiglu_backward(args, stream); });
}

}  // namespace moxie
