#include "moxie/core/swiglu/swiglu.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/where.h>

#include "moxie/torch/exec.h"
#include "moxie/torch/ops/activation.h"
#include "moxie/torch/ops/register.h"
#include "moxie/torch/ops/row_weights.h"
#include "moxie/torch/view.h"

namespace moxie::ops {
namespace {

SymShape check_h(const char* op, const Tensor& h) {
  if (h.scalar_type() != at::kDouble) check_float({op, "h", h});
  TORCH_CHECK_VALUE(h.dim() == 2, op, ": h must be [rows, 2 * hidden_dim], got ", h.dim(), " dims");
  const c10::SymInt cols = h.sym_size(1);
  TORCH_CHECK_VALUE((cols % 2).sym_eq(0).expect_true(__FILE__, __LINE__), op,
                    ": h must be [rows, 2 * hidden_dim], got ", cols, " columns");
  return {h.sym_size(0), cols / 2};
}

// f64 is accepted for gradcheck and computed with torch's own ops.
bool is_double(const Tensor& tensor) { return tensor.scalar_type() == at::kDouble; }

// The constants that the f32 kernels use, so that results in f64 can be compared with theirs.
constexpr double kAlpha = kClampAlpha, kLimit = kClampLimit;

Tensor in_double(const Tensor& h, Activation activation) {
  const auto halves = h.chunk(2, 1);
  if (activation == Activation::kSwiglu) return at::silu(halves[0]) * halves[1];
  const Tensor gate = halves[0].clamp_max(kLimit), up = halves[1].clamp(-kLimit, kLimit);
  return gate * at::sigmoid(gate * kAlpha) * (up + 1);
}

Tensor backward_in_double(const Tensor& da, const Tensor& h, Activation activation) {
  const auto halves = h.chunk(2, 1);
  if (activation == Activation::kSwiglu)
    return at::cat({at::silu_backward(da * halves[1], halves[0]), da * at::silu(halves[0])}, 1);
  const Tensor gate = halves[0].clamp_max(kLimit), up = halves[1].clamp(-kLimit, kLimit);
  const Tensor s = at::sigmoid(gate * kAlpha), glu = gate * s;
  const Tensor dgate = da * (up + 1) * (s + glu * kAlpha * (1 - s));
  return at::cat(
      {at::where(halves[0] > kLimit, 0, dgate), at::where(halves[1].abs() > kLimit, 0, da * glu)},
      1);
}

Tensor swiglu_op(const Tensor& h, std::string_view text) {
  return with_op("swiglu", [&] {
    const Activation activation = parse_activation("swiglu", text);
    const auto out = allocate({{"a", h.scalar_type(), check_h("swiglu", h)}}, h);
    if (h.is_meta()) return out[0];
    const DeviceScope scope(h.device());
    const Tensor from = dense(h);
    if (is_double(h)) return in_double(from, activation);
    swiglu({.h = const_float_view(from), .a = float_view(out[0]), .activation = activation},
           scope.exec());
    return out[0];
  });
}

Tensor swiglu_backward_op(const Tensor& da, const Tensor& h, std::string_view text) {
  constexpr const char* kOp = "swiglu_backward";
  return with_op(kOp, [&] {
    const Activation activation = parse_activation(kOp, text);
    check_shape({kOp, "da", da}, check_h(kOp, h));
    check_device({kOp, "da", da}, h);
    TORCH_CHECK_TYPE(da.scalar_type() == h.scalar_type(), kOp, ": da must be ", h.scalar_type(),
                     " as h, got ", da.scalar_type());
    const auto out = allocate({{"dh", h.scalar_type(), sym_shape(h)}}, h);
    if (h.is_meta()) return out[0];
    const DeviceScope scope(h.device());
    const Tensor grad = dense(da), from = dense(h);
    if (is_double(h)) return backward_in_double(grad, from, activation);
    swiglu_backward({.da = const_float_view(grad),
                     .h = const_float_view(from),
                     .dh = float_view(out[0]),
                     .activation = activation},
                    scope.exec());
    return out[0];
  });
}

Tensor factor_in_double(const Tensor& weights, const Tensor& slot_of) {
  return weights.flatten().index_select(0, slot_of).unsqueeze(1);
}

Tensor weighted_swiglu(const Tensor& h, const Tensor& weights, const Tensor& slot_of,
                       int64_t packed) {
  constexpr const char* kOp = "swiglu";
  return with_op(kOp, [&] {
    const Activation activation = unpack_activation(kOp, packed);
    const auto out = allocate({{"a", h.scalar_type(), check_h(kOp, h)}}, h);
    check_row_weights(kOp, weights, slot_of, h);
    if (h.is_meta()) return out[0];
    const DeviceScope scope(h.device());
    const Tensor from = dense(h);
    if (is_double(h)) return in_double(from, activation) * factor_in_double(weights, slot_of);
    const DenseRowWeights of(weights, slot_of);
    swiglu({.h = const_float_view(from),
            .a = float_view(out[0]),
            .weights = of.view(),
            .activation = activation},
           scope.exec());
    return out[0];
  });
}

std::tuple<Tensor, Tensor> weighted_swiglu_backward(const Tensor& da, const Tensor& h,
                                                    const Tensor& weights, const Tensor& slot_of,
                                                    int64_t packed) {
  constexpr const char* kOp = "swiglu_backward";
  return with_op(kOp, [&] {
    const Activation activation = unpack_activation(kOp, packed);
    check_shape({kOp, "da", da}, check_h(kOp, h));
    check_device({kOp, "da", da}, h);
    TORCH_CHECK_TYPE(da.scalar_type() == h.scalar_type(), kOp, ": da must be ", h.scalar_type(),
                     " as h, got ", da.scalar_type());
    check_row_weights(kOp, weights, slot_of, h);
    const auto out =
        allocate({{"dh", h.scalar_type(), sym_shape(h)}, weight_gradient_of(weights)}, h);
    if (h.is_meta()) return std::tuple(out[0], out[1]);
    const DeviceScope scope(h.device());
    const Tensor grad = dense(da), from = dense(h);
    if (is_double(h)) {
      const Tensor dots = (grad * in_double(from, activation)).sum(1);
      out[1].view({-1}).index_copy_(0, slot_of.to(at::kLong), dots);
      const Tensor dh = backward_in_double(grad, from, activation);
      return std::tuple(dh * factor_in_double(weights, slot_of), out[1]);
    }
    const DenseRowWeights of(weights, slot_of);
    const Tensor workspace = weight_gradient_workspace(da);
    swiglu_backward({.da = const_float_view(grad),
                     .h = const_float_view(from),
                     .dh = float_view(out[0]),
                     .weights = of.gradient(out[1], workspace),
                     .activation = activation},
                    scope.exec());
    return std::tuple(out[0], out[1]);
  });
}

void register_ops(torch::Library& m) {
  m.impl("_weighted_swiglu", TORCH_FN(weighted_swiglu));
  m.impl("_weighted_swiglu_backward", TORCH_FN(weighted_swiglu_backward));
  m.impl("swiglu", TORCH_FN(swiglu_op));
  m.impl("swiglu_backward", TORCH_FN(swiglu_backward_op));
}

}  // namespace

MOXIE_REGISTER_OPS(register_ops)

}  // namespace moxie::ops
