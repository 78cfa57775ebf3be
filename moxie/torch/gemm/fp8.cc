// The passes on FP8 tensor cores.
#include <ATen/TensorOperators.h>
#include <ATen/ops/_scaled_grouped_mm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/diff.h>
#include <ATen/ops/full.h>
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

// Plain scales [.., outer, k] as [.., k / 4 * outer, 4]: of an MXTensor, of weights that were
// quantized on a CPU, of a recipe whose wgrad has other blocks, or of a caller who knows no better.
Tensor in_quads(const Tensor& plain) {
  const int64_t k = plain.size(-1), padded = round_up<int64_t>(k, kQuad);
  if (k == kQuad) return plain;  // they are
  const Tensor codes = at::constant_pad_nd(plain.view(at::kByte), {0, padded - k});
  return codes.unflatten(-1, {padded / kQuad, kQuad})
      .transpose(-3, -2)
      .contiguous()
      .flatten(-3, -2)
      .view(at::kFloat8_e8m0fnu);
}

// An operand of Hopper's kernel. `of` is dense, and holds what the operand views.
GemmOperand sm90_operand(const PassArgs& args, OperandForm as, Quantized& of) {
  ScaleLayout layout = layout_in(args, of, as);
  if (layout == ScaleLayout::kPlain && k_of(as.block, as.form) == kQuadBlock) {
    of.scale = in_quads(*of.scale);
    layout = ScaleLayout::kQuads;
  }
  return gemm_operand(of, as, layout);
}

}  // namespace

OptionalTensor multiply_sm90(const PassArgs& args) {
  const DeviceScope scope(args.a.data.device());
  Quantized a = dense(args.a), b = dense(args.b);
  const OptionalTensor offs = ops::dense(args.offs), bias = ops::dense(args.bias);
  const GemmOperand a_operand = sm90_operand(args, form_of_a(args.recipe, args.pass), a);
  const GemmOperand b_operand = sm90_operand(args, form_of_b(args.recipe, args.pass), b);
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

namespace {

// Rows that no group covers are 0, the others have the bias.
void finish(const PassArgs& args, const Tensor& offs, const Tensor& out, const Exec& exec) {
  const OptionalTensor bias = ops::dense(args.bias);
  std::optional<ConstFloatView> bias_view;
  if (bias) bias_view = const_float_view(*bias);
  finish_rows({.offs = const_view<int32_t>(offs), .bias = bias_view, .out = float_view(out)}, exec);
}

Tensor zeros_for_groups_without_rows(const Tensor& dw, const Tensor& offs) {
  const Tensor rows = at::diff(offs, 1, -1, at::zeros({1}, offs.options()));
  return at::where((rows > 0).view({-1, 1, 1}), dw, at::zeros({}, dw.options()));
}

// torch's grouped product of dense operands with scales as it takes them, and then what it leaves
// as it found it: rows that no group covers, and dw of groups without rows. row_block: what the
// rows of a group are padded to where they are contracted.
Tensor multiply_by_torch(const PassArgs& args, const Quantized& a, const Quantized& b,
                         int64_t row_block) {
  const DeviceScope scope(a.data.device());
  const bool wgrad = args.pass == Pass::kWgrad;
  const Tensor offs = args.offs ? ops::dense(*args.offs)
                                : at::full({1}, args.num_rows, a.data.options().dtype(at::kInt));
  // Fast accumulation would leave the sums of a whole contraction to Hopper's tensor cores, which
  // keep fewer bits of them than f32 has.
  const Tensor out = at::_scaled_grouped_mm(
      a.data, b.data.mT(), *a.scale, *b.scale, wgrad ? padded_offs(offs, row_block) : offs,
      /*bias=*/{}, /*scale_result=*/{}, at::kBFloat16, /*use_fast_accum=*/false);
  if (!wgrad) {
    finish(args, offs, out, scope.exec());
    return out.to(args.dtype);
  }
  const Tensor dw = zeros_for_groups_without_rows(out, offs).to(args.dtype);
  return args.add_to ? args.add_to->add_(dw) : dw;
}

bool is_aligned(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}

}  // namespace

OptionalTensor multiply_sm90_rows(const PassArgs& args) {
  Quantized a = dense(args.a), b = dense(args.b);
  if (!why_not_sm90_rows({.rows = args.num_rows,
                          .groups = args.offs ? args.offs->size(0) : 1,
                          .result = args.dtype,
                          .aligned = is_aligned(a.data) && is_aligned(b.data)})
           .empty())
    return std::nullopt;
  if (args.pass == Pass::kWgrad) {
    // [G, columns]: torch wants the scales of all groups in one dimension.
    a.scale = a.scale->flatten();
    b.scale = b.scale->flatten();
  }
  return multiply_by_torch(args, a, b, kRowScaleAlignment);
}

Tensor multiply_sm100(const PassArgs& args) {
  Quantized a = dense(args.a), b = dense(args.b);
  // Those of a weight cache are bytes.
  a.scale = a.scale->view(at::kFloat8_e8m0fnu);
  b.scale = b.scale->view(at::kFloat8_e8m0fnu);
  return multiply_by_torch(args, a, b, args.recipe.wgrad_x.rows);
}

}  // namespace moxie::ops
