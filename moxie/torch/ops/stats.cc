#include "moxie/torch/stats.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/log10.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/graph_task.h>

#include <limits>

#include "moxie/core/row_scale/dequantize_row_scale.h"
#include "moxie/torch/exec.h"
#include "moxie/torch/gemm/operands.h"
#include "moxie/torch/ops.h"
#include "moxie/torch/ops/register.h"

namespace moxie {

at::Tensor sqnr(const at::Tensor& stats) {
  const at::Tensor signal = stats.select(-1, 0), noise = stats.select(-1, 1);
  return at::where(noise == 0, std::numeric_limits<double>::infinity(),
                   10 * at::log10(signal / noise));
}

namespace ops {
namespace {

constexpr const char* kOp = "quantization_stats";

// Which operand of a product a tensor is.
struct Part {
  bool weights;
  Form form;
  Role role;  // tokens
};

Part parse_part(const std::optional<std::string_view>& text, const Tensor& x) {
  const std::string_view name = text.value_or(x.dim() == 3 ? "w" : "x");
  for (const char* known : kStatsParts) {
    if (name != known) continue;
    const std::string_view stem = name.substr(0, name.find('_'));
    return {stem == "w", stem == name ? Form::kRowwise : Form::kColwise,
            stem == "dy" ? Role::kDy : Role::kX};
  }
  fail(kOp, ": part must be x, w, x_t, w_t, dy or dy_t, got '", name, "'");
}

void check(const Recipe& recipe, const Part& part, const Tensor& x, const OptionalTensor& offs) {
  if (!recipe.keeps_dtype) check_float({kOp, "x", x});
  TORCH_CHECK_VALUE(x.dim() == (part.weights ? 3 : 2), kOp, ": x must be ",
                    part.weights ? "[groups, n, k]" : "[rows, cols]", " for this part, got ",
                    x.dim(), " dims");
  TORCH_CHECK_VALUE(!offs || !part.weights, kOp, ": offs are for tokens, and this part is w");
  check_offs(kOp, offs, x);
}

Quantized quantized(const Plan& plan, const Part& part, const Tensor& x,
                    const OptionalTensor& offs) {
  const bool rowwise = part.form == Form::kRowwise;
  const Need need = rowwise ? Need::kRowwise : Need::kColwise;
  const Forms forms = part.weights ? quantize_weights(plan, x, need)
                                   : quantize_tokens(plan, x, offs, part.role, need);
  return rowwise ? forms.rowwise : forms.colwise;
}

// What the elements stand for with these scales, in f32 and in the order of x.
Tensor decode(const Recipe& recipe, const Part& part, const Quantized& from, const Tensor& x,
              const OptionalTensor& offs) {
  if (recipe.scaling == Scaling::kRow) {
    const DeviceScope scope(x.device());
    const Tensor out = at::empty(x.sizes(), x.options().dtype(at::kFloat));
    const OptionalTensor ends = dense(offs);
    dequantize_row_scale({.form = part.form,
                          .qdata = const_view<e4m3>(from.data),
                          .scale = const_view<float>(*from.scale),
                          .offs = offs_view(ends),
                          .x = float_view(out)},
                         scope.exec());
    return out;
  }
  const Block token_block = part.role == Role::kX ? recipe.wgrad_x : recipe.wgrad_dy;
  if (part.form == Form::kRowwise) {
    const std::string block = name(part.weights ? recipe.weights : recipe.activations);
    return dequantize_rowwise(from.data, *from.scale,
                              {.offs = offs, .block = block, .dtype = at::kFloat});
  }
  const std::string block = name(part.weights ? recipe.weights_t() : token_block);
  return dequantize_colwise(from.data, *from.scale, x.size(-2),
                            {.offs = offs, .block = block, .dtype = at::kFloat});
}

// With every scale 1: the elements themselves.
Quantized unscaled(const Quantized& from) {
  constexpr int64_t kCodeOfOne = 127;
  return {from.data,
          at::full(from.scale->sizes(), kCodeOfOne, from.scale->options().dtype(at::kByte))
              .view(at::kFloat8_e8m0fnu)};
}

Tensor energy(const Tensor& values) {
  return at::linalg_vector_norm(values, 2, at::OptionalIntArrayRef(), false, at::kDouble).square();
}

Tensor compute(const Recipe& recipe, const Part& part, const Tensor& x,
               const OptionalTensor& offs) {
  const Plan plan{recipe, to_text(recipe), Path::kEmulated};
  const Quantized elements = quantized(plan, part, x, offs);
  Tensor values = recipe.keeps_dtype ? x : x.to(at::kFloat);
  Tensor decoded =
      elements.scale ? decode(recipe, part, elements, x, offs) : elements.data.to(values.dtype());
  Tensor count = at::full({}, x.numel(), values.options().dtype(at::kDouble));
  if (offs) {  // rows past the last group are nobody's
    const Tensor end = offs->select(0, -1);
    const Tensor covered = (at::arange(x.size(0), offs->options()) < end).unsqueeze(-1);
    values = at::where(covered, values, 0);
    decoded = at::where(covered, decoded, 0);
    count = covered.sum().to(at::kDouble) * x.size(1);
  }
  const Tensor flushed = ((values != 0) & (decoded == 0)).sum().to(at::kDouble);
  Tensor clipped = at::zeros_like(count);
  const bool can_clip = recipe.scaling == Scaling::kBlock && elements.scale &&
                        (recipe.rule == ScaleRule::kFloor || recipe.rule == ScaleRule::kEven);
  if (can_clip) {
    // Past half a step above the largest element, that is 464 / 448 of what it stands for.
    const Tensor limit = decode(recipe, part, unscaled(elements), x, offs).abs() == 448;
    clipped = (limit & (values.abs() > decoded.abs() * (464. / 448))).sum().to(at::kDouble);
  }
  return at::stack({energy(values), energy(values - decoded), flushed, clipped, count});
}

Tensor quantization_stats_op(const Tensor& x, const OptionalTensor& offs, std::string_view recipe,
                             std::optional<std::string_view> part) {
  return with_op(kOp, [&] {
    const at::NoGradGuard no_grad;
    const Recipe parsed = parse_recipe(recipe, kOp);
    const Part which = parse_part(part, x);
    check(parsed, which, x, offs);
    if (x.is_meta()) return allocate({{"stats", at::kDouble, {c10::SymInt(kNumStats)}}}, x)[0];
    return compute(parsed, which, x, offs);
  });
}

void add_once_op(const Tensor& total, const Tensor& addend) {
  constexpr int kNone = -1;
  if (total.is_meta() || torch::autograd::get_current_graph_task_id() != kNone) return;
  const at::NoGradGuard no_grad;
  total.add_(addend);
}

}  // namespace

void register_stats(torch::Library& m) {
  m.impl("quantization_stats", TORCH_FN(quantization_stats_op));
  m.impl("_add_once_", TORCH_FN(add_once_op));
}

}  // namespace ops
}  // namespace moxie
