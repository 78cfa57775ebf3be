// The passes on FP8 tensor cores.
#include <ATen/TensorOperators.h>
#include <ATen/ops/_scaled_grouped_mm.h>
#include <ATen/ops/diff.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "moxie/core/gemm/grouped_mm.h"
#include "moxie/torch/exec.h"
#include "moxie/torch/gemm/products.h"
#include "moxie/torch/ops.h"

namespace moxie::ops {
namespace {

Quantized dense(const Quantized& operand) {
  return {ops::dense(operand.data), ops::dense(operand.scale)};
}

}  // namespace

OptionalTensor multiply_sm90(const PassArgs& args) {
  const DeviceScope scope(args.a.data.device());
  const Quantized a = dense(args.a), b = dense(args.b);
  const OptionalTensor offs = ops::dense(args.offs), bias = ops::dense(args.bias);
  const GemmOperand a_operand = gemm_operand(a, form_of_a(args.recipe, args.pass));
  const GemmOperand b_operand = gemm_operand(b, form_of_b(args.recipe, args.pass));
  const FloatView result{nullptr, args.dtype == at::kFloat ? Format::kF32 : Format::kBf16,
                         args.out};
  if (args.pass == Pass::kWgrad) {
    GroupedWgradArgs problem{.a = a_operand,
                             .b = b_operand,
                             .rows = args.num_rows,
                             .offs = offs_view(offs),
                             .out = result,
                             .sum = args.sum()};
    if (!why_not_sm90(problem).empty()) return std::nullopt;
    const Tensor out = args.allocate();
    problem.out = float_view(out);
    grouped_wgrad(problem, scope.exec());
    return out;
  }
  GroupedMmArgs problem{
      .a = a_operand, .b = b_operand, .offs = offs_view(offs), .bias = std::nullopt, .out = result};
  if (bias) problem.bias = const_float_view(*bias);
  if (!why_not_sm90(problem).empty()) return std::nullopt;
  const Tensor out = args.allocate();
  problem.out = float_view(out);
  grouped_mm(problem, scope.exec());
  return out;
}

Tensor multiply_sm100(const PassArgs& args) {
  const DeviceScope scope(args.a.data.device());
  const bool wgrad = args.pass == Pass::kWgrad;
  const Quantized a = dense(args.a), b = dense(args.b);
  const Tensor offs = args.offs ? ops::dense(*args.offs)
                                : at::zeros({1}, a.data.options().dtype(at::kInt)) + args.num_rows;
  const auto product = [&](const Tensor& ends) {
    // The scales of a weight cache are bytes.
    const auto as_e8m0 = [](const Tensor& scale) { return scale.view(at::kFloat8_e8m0fnu); };
    return at::_scaled_grouped_mm(a.data, b.data.mT(), as_e8m0(*a.scale), as_e8m0(*b.scale), ends,
                                  /*bias=*/{},
                                  /*scale_result=*/{}, at::kBFloat16);
  };
  if (!wgrad) {
    const Tensor out = product(offs);
    const OptionalTensor bias = ops::dense(args.bias);
    std::optional<ConstFloatView> bias_view;
    if (bias) bias_view = const_float_view(*bias);
    finish_rows({.offs = const_view<int32_t>(offs), .bias = bias_view, .out = float_view(out)},
                scope.exec());
    return out.to(args.dtype);
  }
  // Its contraction is over rows as they are padded. What it does not write, the results of groups
  // without rows, may hold anything.
  const Tensor out = product(padded_offs(offs, args.recipe.wgrad_x.rows));
  const Tensor rows = at::diff(offs, 1, -1, at::zeros({1}, offs.options()));
  const Tensor dw =
      at::where((rows > 0).view({-1, 1, 1}), out, at::zeros({}, out.options())).to(args.dtype);
  return args.add_to ? args.add_to->add_(dw) : dw;
}

}  // namespace moxie::ops
