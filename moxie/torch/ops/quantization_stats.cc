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

#include "moxie/torch/ops/dequantize.h"
#include "moxie/torch/ops/quantize.h"
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
  bool gradient;  // dy (or dy_t)
  Form form;
};

Part parse_part(const std::optional<std::string_view>& text, const Tensor& x) {
  const std::string_view name = text.value_or(x.dim() == 3 ? "w" : "x");
  for (const char* known : kStatsParts) {
    if (name != known) continue;
    const std::string_view stem = name.substr(0, name.find('_'));
    return {.weights = stem == "w",
            .gradient = stem == "dy",
            .form = stem == name ? Form::kRowwise : Form::kColwise};
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

Block block_of(const Recipe& recipe, const Part& part) {
  const bool rowwise = part.form == Form::kRowwise;
  if (part.weights) return rowwise ? recipe.weights : recipe.weights_t();
  if (rowwise) return recipe.activations;
  return part.gradient ? recipe.wgrad_dy : recipe.wgrad_x;
}

bool is_quantized(const Recipe& recipe, const Part& part) {
  const bool of_wgrad = !part.weights && part.form == Form::kColwise;
  return of_wgrad ? recipe.quantizes_wgrad() : recipe.quantizes();
}

// Decodes qdata and scale to f32, in the order of x.
Tensor decode(const Recipe& recipe, const Part& part, const std::vector<Tensor>& from,
              const Tensor& x, const OptionalTensor& offs) {
  return dequantize({.op = kOp,
                     .form = part.form,
                     .qdata = from[0],
                     .scale = from[1],
                     .offs = offs,
                     .block = block_of(recipe, part),
                     .num_rows = x.sym_size(-2),
                     .dtype = at::kFloat,
                     .scaling = recipe.scaling});
}

// Replaces every scale by 1, so that decode() returns the elements as they are stored.
std::vector<Tensor> unscaled(const std::vector<Tensor>& from) {
  constexpr int64_t kCodeOfOne = 127;
  return {from[0], at::full(from[1].sizes(), kCodeOfOne, from[1].options().dtype(at::kByte))
                       .view(at::kFloat8_e8m0fnu)};
}

Tensor energy(const Tensor& values) {
  return at::linalg_vector_norm(values, 2, at::OptionalIntArrayRef(), false, at::kDouble).square();
}

Tensor compute(const Recipe& recipe, const Part& part, const Tensor& x,
               const OptionalTensor& offs) {
  Tensor values = recipe.keeps_dtype ? x : x.to(at::kFloat);
  Tensor decoded = recipe.keeps_dtype ? x : x.to(at::kBFloat16).to(at::kFloat);
  std::vector<Tensor> elements;
  if (is_quantized(recipe, part)) {
    QuantizeSpec spec{.scaling = recipe.scaling,
                      .rule = recipe.rule,
                      .scales_too_small = recipe.scales_too_small};
    (part.form == Form::kRowwise ? spec.rowwise : spec.colwise) = block_of(recipe, part);
    elements = quantize(kOp, x, offs, spec);
    decoded = decode(recipe, part, elements, x, offs);
  }
  Tensor count = at::full({}, x.numel(), values.options().dtype(at::kDouble));
  if (offs) {                         // rows past the last group do not count
    const Tensor end = offs->amax();  // the end of the last group, even if offs decrease
    const Tensor covered = (at::arange(x.size(0), offs->options()) < end).unsqueeze(-1);
    values = at::where(covered, values, 0);
    decoded = at::where(covered, decoded, 0);
    count = covered.sum().to(at::kDouble) * x.size(1);
  }
  const Tensor flushed = ((values != 0) & (decoded == 0)).sum().to(at::kDouble);
  Tensor clipped = at::zeros_like(count);
  const bool can_clip = recipe.scaling == Scaling::kBlock && !elements.empty() &&
                        (recipe.rule == ScaleRule::kFloor || recipe.rule == ScaleRule::kEven);
  if (can_clip) {
    // An element is clipped if it became 448, the largest e4m3, and its value lies more than half a
    // step (16) beyond: above 464 / 448 of what it decodes to.
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

void register_ops(torch::Library& m) {
  m.impl("quantization_stats", TORCH_FN(quantization_stats_op));
  m.impl("_add_once_", TORCH_FN(add_once_op));
}

}  // namespace

MOXIE_REGISTER_OPS(register_ops)

}  // namespace ops
}  // namespace moxie
