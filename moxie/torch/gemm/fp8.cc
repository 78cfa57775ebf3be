// The passes on FP8 tensor cores: Moxie's Hopper kernel, and torch's scaled grouped GEMMs.
#include <ATen/TensorOperators.h>
#include <ATen/ops/_scaled_grouped_mm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/diff.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "moxie/core/gemm/grouped_mm.h"
#include "moxie/core/gemm/grouped_wgrad.h"
#include "moxie/core/groups/groups.h"
#include "moxie/core/layout/shape.h"
#include "moxie/torch/exec.h"
#include "moxie/torch/gemm/multiply.h"

namespace moxie::ops {
namespace {

constexpr size_t kScaleBytes = 4;  // alignment of scales: a load reads four e8m0, or one f32

Quantized aligned(const Quantized& operand) {
  return {ops::aligned(operand.data), ops::aligned(*operand.scale, kScaleBytes)};
}

// Converts plain scales [.., outer, k] to quads [.., k / 4 * outer, 4]. Scales are plain in an
// MXTensor, in weights quantized on a CPU, for recipes with other blocks in wgrad, and where
// callers pass them.
Tensor in_quads(const Tensor& plain) {
  const int64_t k = plain.size(-1), padded = round_up<int64_t>(k, kQuad);
  if (k == kQuad) return plain;  // four columns: quads have the same bytes
  const Tensor codes = at::constant_pad_nd(plain.view(at::kByte), {0, padded - k});
  return codes.unflatten(-1, {padded / kQuad, kQuad})
      .transpose(-3, -2)
      .contiguous()
      .flatten(-3, -2)
      .view(at::kFloat8_e8m0fnu);
}

// Makes an operand of the Hopper kernel, which views `of`. `of` must be dense and outlive it; if
// its scales are converted to quads, it holds the new ones.
GemmOperand sm90_operand(const PassArgs& args, FormAndBlock as, Quantized& of) {
  ScaleLayout layout = args.layout_of(of);
  if (layout == ScaleLayout::kPlain && k_of(as.block, as.form) == kQuadBlock) {
    of.scale = in_quads(*of.scale);
    layout = ScaleLayout::kQuads;
  }
  return gemm_operand(of, as, layout);
}

}  // namespace

Tensor multiply_sm90(const PassArgs& args) {
  const DeviceScope scope(args.a.data.device());
  Quantized a = aligned(args.a), b = aligned(args.b);
  const OptionalTensor offs = ops::dense(args.offs), bias = ops::dense(args.bias);
  const GemmOperand a_operand = sm90_operand(args, form_of_a(args.recipe(), args.pass), a);
  const GemmOperand b_operand = sm90_operand(args, form_of_b(args.recipe(), args.pass), b);
  if (args.pass != Pass::kWgrad) {
    const Tensor out = args.allocate();
    grouped_mm({.a = a_operand,
                .b = b_operand,
                .offs = offs_view(offs),
                .bias = bias ? std::optional(const_float_view(*bias)) : std::nullopt,
                .out = float_view(out)},
               scope.exec());
    return out;
  }
  // The kernel adds to add_to itself only if that is aligned, as it stores 16 bytes at a time.
  // Otherwise it writes a new tensor, which is added afterwards.
  const bool adds = args.add_to && is_aligned(*args.add_to);
  const Tensor out = adds || !args.add_to ? args.allocate() : at::empty_like(*args.add_to);
  Tensor workspace;
  if (args.padding == Padding::kAnything && offs)
    workspace = at::empty({offs->size(0) * kGroupMapsBytes}, a.data.options().dtype(at::kByte));
  grouped_wgrad({.a = a_operand,
                 .b = b_operand,
                 .rows = args.num_rows,
                 .offs = offs_view(offs),
                 .out = float_view(out),
                 .sum = adds ? Sum::kAdd : Sum::kOverwrite,
                 .padding = args.padding,
                 .workspace = workspace.defined() ? view<std::byte>(workspace) : View<std::byte>{}},
                scope.exec());
  return args.add_to && !adds ? args.add_to->add_(out) : out;
}

namespace {

// A mask over the `count` rows that a colwise buffer has room for: 1 for rows of a group, 0 for
// padding and unused rows.
Tensor rows_of_groups(const PassArgs& args, const Tensor& offs, int64_t alignment, int64_t count,
                      const Exec& exec) {
  const Tensor ones = at::ones({args.num_rows, 1}, offs.options().dtype(at::kByte));
  const int64_t groups = offs.size(0);
  const Tensor padded =
      at::empty({pad_groups_rows(args.num_rows, groups, alignment), 1}, ones.options());
  const Tensor starts = at::empty_like(offs), ends = at::empty_like(offs);
  pad_groups({.x = const_view<std::byte>(ones),
              .offs = const_view<int32_t>(offs),
              .alignment = alignment,
              .padded = view<std::byte>(padded),
              .starts = view<int32_t>(starts),
              .ends = view<int32_t>(ends)},
             exec);
  return at::constant_pad_nd(padded.flatten(), {0, count - padded.size(0)});
}

// Zeroes the padding in both operands of wgrad, because torch's kernels multiply it as if it were
// rows. Works on copies, because the buffers belong to the caller.
void clear_padding(const PassArgs& args, Quantized& a, Quantized& b, const Tensor& offs,
                   int64_t alignment, const Exec& exec) {
  const Tensor live = rows_of_groups(args, offs, alignment, a.data.size(1), exec);
  for (Tensor* data : {&a.data, &b.data})
    *data = (data->view(at::kByte) * live).view(at::kFloat8_e4m3fn);
}

Tensor zeros_for_groups_without_rows(const Tensor& dw, const Tensor& ends) {
  const Tensor rows = at::diff(ends, 1, -1, at::zeros({1}, ends.options()));
  return at::where((rows > 0).view({-1, 1, 1}), dw, at::zeros({}, dw.options()));
}

// Multiplies by torch's scaled grouped GEMM; operands must be dense, with scales in the layout that
// it takes. Then writes what torch leaves unwritten: rows in no group, and dw of empty groups.
// row_block: wgrad's operands have each group padded to a multiple of this many rows.
Tensor multiply_by_torch(const PassArgs& args, Quantized a, Quantized b, int64_t row_block) {
  const DeviceScope scope(a.data.device());
  const bool wgrad = args.pass == Pass::kWgrad;
  const int64_t alignment = wgrad ? row_block : 1;
  const Tensor offs = args.offs ? ops::dense(*args.offs)
                                : at::full({1}, args.num_rows, a.data.options().dtype(at::kInt));
  const Tensor ends =
      args.offs || wgrad ? ends_for_torch(args, offs, alignment, scope.exec()) : offs;
  if (wgrad && args.padding == Padding::kAnything)
    clear_padding(args, a, b, offs, alignment, scope.exec());
  // Turns fast accumulation off: it would sum a whole contraction inside Hopper's tensor cores,
  // with fewer bits than f32 has.
  const Tensor out = at::_scaled_grouped_mm(a.data, b.data.mT(), *a.scale, *b.scale, ends,
                                            /*bias=*/{}, /*scale_result=*/{}, at::kBFloat16,
                                            /*use_fast_accum=*/false);
  if (!wgrad) {
    finish_by_torch(args, ends, out, scope.exec());
    return out.to(args.dtype);
  }
  const Tensor dw = zeros_for_groups_without_rows(out, ends).to(args.dtype);
  return args.add_to ? args.add_to->add_(dw) : dw;
}

}  // namespace

Tensor multiply_sm90_rows(const PassArgs& args) {
  Quantized a = aligned(args.a), b = aligned(args.b);
  if (args.pass == Pass::kWgrad) {
    // torch wants the scales [G, columns] of all groups in one dimension.
    a.scale = a.scale->flatten();
    b.scale = b.scale->flatten();
  }
  return multiply_by_torch(args, a, b, kRowScaleAlignment);
}

Tensor multiply_sm100(const PassArgs& args) {
  Quantized a = aligned(args.a), b = aligned(args.b);
  // Weight caches may hold scales as bytes, because inductor cannot write e8m0.
  a.scale = a.scale->view(at::kFloat8_e8m0fnu);
  b.scale = b.scale->view(at::kFloat8_e8m0fnu);
  return multiply_by_torch(args, a, b, args.recipe().wgrad_x.rows);
}

}  // namespace moxie::ops
