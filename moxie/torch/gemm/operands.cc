#include "moxie/torch/gemm/operands.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/where.h>

#include "moxie/torch/ops.h"

namespace moxie::ops {
namespace {

// What a pass without quantization multiplies: bf16, unless the recipe keeps the dtype.
Tensor high_precision_operand(const Recipe& recipe, const Tensor& x) {
  return recipe.keeps_dtype ? x : x.to(at::kBFloat16);
}

Forms quantize_by_row(const Tensor& x, const OptionalTensor& offs, Need need) {
  Forms forms;
  if (need != Need::kColwise) {
    auto [qdata, scale] = quantize_per_row(x, offs);
    forms.rowwise = {qdata, scale};
  }
  if (need != Need::kRowwise) {
    auto [qdata_t, scale_t] = quantize_per_col(x, offs);
    forms.colwise = {qdata_t, scale_t};
  }
  return forms;
}

// As if every scale had been chosen one power of two too small: the top of each block clips.
Quantized with_scales_too_small(const Quantized& right) {
  const Tensor code = right.scale->view(at::kByte);
  const Tensor halved = at::where((code > 0) & (code < kE8m0Nan), code - 1, code);
  return {(right.data.to(at::kFloat) * 2).clamp(-448, 448).to(at::kFloat8_e4m3fn),
          halved.view(at::kFloat8_e8m0fnu)};
}

struct Blocks {
  Block rowwise, colwise;
};

Forms quantize_by_block(const Plan& plan, const Tensor& x, const OptionalTensor& offs,
                        const Blocks& blocks, Need need) {
  if (plan.recipe.scales_too_small) {
    Plan right = plan;
    right.recipe.scales_too_small = false;
    Forms forms = quantize_by_block(right, x, offs, blocks, need);
    if (need != Need::kColwise) forms.rowwise = with_scales_too_small(forms.rowwise);
    if (need != Need::kRowwise) forms.colwise = with_scales_too_small(forms.colwise);
    return forms;
  }
  const std::string rowwise = name(blocks.rowwise), colwise = name(blocks.colwise);
  const QuantizeOptions options{.offs = offs,
                                .rowwise_block = rowwise,
                                .colwise_block = colwise,
                                .rule = name(plan.recipe.rule),
                                .scale_layout = name(plan.layout)};
  switch (need) {
    case Need::kRowwise: {
      auto [qdata, scale] = quantize_rowwise(x, options);
      return {{qdata, scale}, {}};
    }
    case Need::kColwise: {
      auto [qdata_t, scale_t] = quantize_colwise(x, options);
      return {{}, {qdata_t, scale_t}};
    }
    case Need::kBoth: break;
  }
  auto [qdata, scale, qdata_t, scale_t] = quantize_both(x, options);
  return {{qdata, scale}, {qdata_t, scale_t}};
}

// The colwise form of x; options say how it comes.
Quantized requantize_by_block(const Plan& plan, const Quantized& x, RequantizeOptions options) {
  const std::string colwise = name(plan.recipe.wgrad_x);
  options.colwise_block = colwise;
  options.rule = name(plan.recipe.rule);
  options.scale_layout = name(plan.layout);
  auto [qdata_t, scale_t] = requantize(x.data, *x.scale, options);
  return {qdata_t, scale_t};
}

// What an op fused with the quantizer of x or dy takes of a recipe.
struct TokenOptions : QuantizeOptions {
  TokenOptions(const Plan& plan, const OptionalTensor& ends, Block colwise)
      : rowwise_name(name(plan.recipe.activations)), colwise_name(name(colwise)) {
    offs = ends;
    rowwise_block = rowwise_name;
    colwise_block = colwise_name;
    rule = name(plan.recipe.rule);
    scale_layout = name(plan.layout);
  }
  TokenOptions(const TokenOptions&) = delete;  // blocks are views of the names
  TokenOptions& operator=(const TokenOptions&) = delete;

  std::string rowwise_name, colwise_name;
};

Forms as_forms(const std::tuple<Tensor, Tensor>& rowwise) {
  const auto& [qdata, scale] = rowwise;
  return {{qdata, scale}, {}};
}

Forms as_forms(const std::tuple<Tensor, Tensor, Tensor, Tensor>& both) {
  const auto& [qdata, scale, qdata_t, scale_t] = both;
  return {{qdata, scale}, {qdata_t, scale_t}};
}

}  // namespace

OperandForm form_of_a(const Recipe& recipe, Pass pass) {
  if (pass == Pass::kWgrad) return {Form::kColwise, recipe.wgrad_dy};
  return {Form::kRowwise, recipe.activations};
}

OperandForm form_of_b(const Recipe& recipe, Pass pass) {
  switch (pass) {
    case Pass::kForward: return {Form::kRowwise, recipe.weights};
    case Pass::kDgrad: return {Form::kColwise, recipe.weights_t()};
    case Pass::kWgrad: break;
  }
  return {Form::kColwise, recipe.wgrad_x};
}

void check_scale(const Input& scale, Scaling scaling) {
  const auto dtype = scale.tensor.scalar_type();
  if (scaling == Scaling::kRow) {
    TORCH_CHECK_TYPE(dtype == at::kFloat, scale.op, ": ", scale.name,
                     " must be torch.float32 in this recipe, got ", dtype_name(dtype));
  } else if (dtype != at::kByte) {  // the bytes of e8m0, as a weight cache under inductor has them
    check_e8m0(scale);
  }
}

Plan make_plan(std::string_view recipe, const Tensor& w, const char* op, const char* name) {
  TORCH_CHECK_VALUE(w.dim() == 3, op, ": ", name, " must be [groups, n, k], got ", w.dim(),
                    " dims");
  Plan plan{parse_recipe(recipe, op), std::string(recipe), Path::kEmulated};
  const c10::Device device = device_behind(w);
  const auto size = [&](int i) {
    return sizes_matter(plan.recipe, device) ? w.sym_size(i).guard_int(__FILE__, __LINE__) : 0;
  };
  plan.path = choose_path(plan.recipe, device, size(1), size(2)).path;
  plan.layout = choose_layout(plan.recipe, plan.path, device.type());
  return plan;
}

ScaleLayout layout_of_weights(Path path, const Tensor& scale, const Tensor& qdata, OperandForm as) {
  if (path == Path::kSm100) return ScaleLayout::kSwizzled;
  if (scale.dim() == 2 && path == Path::kEmulated) return ScaleLayout::kSwizzled;
  if (scale.dim() != 3) return ScaleLayout::kPlain;
  const int k_block = k_of(as.block, as.form);
  const auto has_columns = [&](const c10::SymInt& count) {
    return scale.sym_size(2).sym_eq(count).guard_or_false(__FILE__, __LINE__);
  };
  const bool quads = k_block == kQuadBlock && has_columns(kQuad) &&
                     !has_columns(ceil_div(qdata.sym_size(-1), c10::SymInt(k_block)));
  return quads ? ScaleLayout::kQuads : ScaleLayout::kPlain;
}

ScaleLayout layout_of_weights(const Plan& plan, const Forms& w) {
  const auto of = [&](const Quantized& form, Pass pass) {
    return layout_of_weights(plan.path, *form.scale, form.data, form_of_b(plan.recipe, pass));
  };
  const ScaleLayout rowwise = of(w.rowwise, Pass::kForward);
  return rowwise == ScaleLayout::kPlain ? of(w.colwise, Pass::kDgrad) : rowwise;
}

Forms quantize_tokens(const Plan& plan, const Tensor& x, const OptionalTensor& offs, Role role,
                      Need need) {
  const Recipe& recipe = plan.recipe;
  if (!recipe.quantizes()) {
    const Tensor plain = high_precision_operand(recipe, x);
    return {{plain, {}}, {plain, {}}};
  }
  if (recipe.quantizes_wgrad() || need == Need::kRowwise) {
    if (recipe.scaling == Scaling::kRow) return quantize_by_row(x, offs, need);
    const Block colwise = role == Role::kX ? recipe.wgrad_x : recipe.wgrad_dy;
    return quantize_by_block(plan, x, offs, {recipe.activations, colwise}, need);
  }
  Forms forms;
  if (need == Need::kBoth) forms = quantize_tokens(plan, x, offs, role, Need::kRowwise);
  forms.colwise = {x.to(at::kBFloat16), {}};
  return forms;
}

bool fuses(const Plan& plan, const Tensor& from, Need need) {
  // On a GPU the fused kernels are for bf16; f32 takes as long there as one op after the other.
  return plan.recipe.quantizes() && plan.recipe.scaling == Scaling::kBlock &&
         !plan.recipe.scales_too_small &&
         (plan.recipe.quantizes_wgrad() || need == Need::kRowwise) &&
         (from.scalar_type() == at::kBFloat16 || !device_behind(from).is_cuda());
}

Forms quantize_swiglu(const Plan& plan, const Tensor& h, const OptionalTensor& offs, Need need) {
  const TokenOptions options(plan, offs, plan.recipe.wgrad_x);
  if (need == Need::kRowwise) return as_forms(swiglu_quantize_rowwise(h, options));
  return as_forms(swiglu_quantize_both(h, options));
}

Forms quantize_swiglu_backward(const Plan& plan, const Tensor& da, const Tensor& h,
                               const OptionalTensor& offs) {
  return as_forms(
      swiglu_backward_quantize_both(da, h, TokenOptions(plan, offs, plan.recipe.wgrad_dy)));
}

Forms quantize_permuted(const Plan& plan, const Tensor& x, const Permutation& permutation,
                        const OptionalTensor& offs, Need need) {
  const TokenOptions options(plan, offs, plan.recipe.wgrad_x);
  const auto& [slot_of, row_of, top_k] = permutation;
  if (need == Need::kRowwise)
    return as_forms(permute_quantize_rowwise(x, *slot_of, top_k, options));
  return as_forms(permute_quantize_both(x, *slot_of, top_k, options));
}

Forms quantize_weights(const Plan& plan, const Tensor& w, Need need) {
  const Recipe& recipe = plan.recipe;
  if (!recipe.quantizes()) {
    const Tensor plain = high_precision_operand(recipe, w);
    return {{plain, {}}, {plain, {}}};
  }
  if (recipe.scaling == Scaling::kRow) return quantize_by_row(w, {}, need);
  return quantize_by_block(plan, w, {}, {recipe.weights, recipe.weights_t()}, need);
}

Results quantized_weights_results(const Plan& plan, const Tensor& w) {
  const Recipe& recipe = plan.recipe;
  const bool by_row = recipe.scaling == Scaling::kRow;
  const auto dtype = by_row ? at::kFloat : at::kFloat8_e8m0fnu;
  const auto shape = [&](Form form, Block block) {
    return by_row ? row_scale_shape<c10::SymInt>(sym_shape(w), {}, form)
                  : operand_shape<c10::SymInt>(sym_shape(w), {}, form, block, plan.layout);
  };
  const auto rowwise = shape(Form::kRowwise, recipe.weights);
  const auto colwise = shape(Form::kColwise, recipe.weights_t());
  return {{"qdata", at::kFloat8_e4m3fn, rowwise.qdata},
          {"scale", dtype, rowwise.scale},
          {"qdata_t", at::kFloat8_e4m3fn, colwise.qdata},
          {"scale_t", dtype, colwise.scale}};
}

void quantize_weights_into(const Plan& plan, const Tensor& w, const Forms& out) {
  const auto& [rowwise, colwise] = out;
  if (plan.recipe.scaling == Scaling::kRow) {
    quantize_per_row_out(w, {}, rowwise.data, *rowwise.scale);
    quantize_per_col_out(w, {}, colwise.data, *colwise.scale);
    return;
  }
  const std::string row = name(plan.recipe.weights), col = name(plan.recipe.weights_t());
  quantize_both_out(w,
                    {.rowwise_block = row,
                     .colwise_block = col,
                     .rule = name(plan.recipe.rule),
                     .scale_layout = name(plan.layout)},
                    rowwise.data, *rowwise.scale, colwise.data, *colwise.scale);
}

Quantized requantize_tokens(const Plan& plan, const Quantized& x, const OptionalTensor& offs) {
  // One scale per row has no FP8 to FP8 conversion: what was kept is x itself.
  if (plan.recipe.scaling == Scaling::kRow)
    return quantize_tokens(plan, x.data, offs, Role::kX, Need::kColwise).colwise;
  const std::string block = name(plan.recipe.activations);
  return requantize_by_block(plan, x,
                             {.offs = offs, .block = block, .from_layout = name(plan.layout)});
}

void check_mx(const Plan& plan, const char* op, const MxTensor& x) {
  TORCH_CHECK_VALUE(plan.recipe.scaling == Scaling::kBlock, op, ": x is an MXTensor in blocks of ",
                    x.block,
                    ", and this recipe has none; x.dequantize() is a plain tensor, and the recipes "
                    "mxfp8_* have blocks");
  const std::string wanted = name(plan.recipe.activations);
  TORCH_CHECK_VALUE(x.block == wanted || (x.block == "1x128" && wanted == "1x32"), op,
                    ": x is an MXTensor in blocks of ", x.block,
                    ", and the recipe takes activations in blocks of ", wanted,
                    "; quantize it so, or take a recipe with activations=", x.block);
}

Quantized rowwise_mx(const Plan& plan, const MxTensor& x, const OptionalTensor& offs) {
  // Decoding takes plain scales as they are; to swizzle them first would cost more than it saves.
  // Hopper's product puts them in order itself.
  const bool swizzled = plan.path == Path::kSm100;
  Tensor scale = x.scale;
  // A block of 128 is four of 32 with one scale.
  if (x.block != name(plan.recipe.activations) || (swizzled && x.block != "1x32"))
    scale = replicate_scale(scale, x.qdata.sym_size(0), x.qdata.sym_size(1), x.block);
  return {x.qdata, swizzled ? swizzle_scale(scale, offs) : scale};
}

Quantized colwise_mx(const Plan& plan, const Quantized& x, std::string_view block,
                     const OptionalTensor& offs) {
  if (!plan.recipe.quantizes_wgrad())
    return {dequantize_rowwise(x.data, *x.scale, {.block = block}), {}};
  return requantize_by_block(plan, x, {.offs = offs, .block = block});
}

bool saves_colwise(const Recipe& recipe, const c10::SymInt& rows, const c10::SymInt& groups) {
  if (!recipe.quantizes_wgrad()) return true;
  if (recipe.scaling == Scaling::kRow) {
    // Bytes per column: elements and one f32 per group, against bf16.
    const c10::SymInt padded = least_padded_rows(rows, groups, kRowScaleAlignment);
    return (padded + groups * 4).sym_le(rows * 2).guard_or_false(__FILE__, __LINE__);
  }
  const int64_t block = recipe.wgrad_x.rows;
  // By the least: the buffer has up to 255 rows more, which only small tensors notice, and numbers
  // must not depend on how memory is laid out.
  const c10::SymInt padded = least_padded_rows(rows, groups, block);
  // Blocks of 128 rows promise half the memory of bf16 (0.55 with scales and padding). Blocks of 32
  // promise what quantizing x itself gives, for as long as that is smaller than bf16.
  // (A scale per 32 makes 33 bytes of 32.)
  const c10::SymInt limit = block == 128 ? rows * 109 / 100 : rows * 64 / 33;
  return padded.sym_le(limit).guard_or_false(__FILE__, __LINE__);
}

}  // namespace moxie::ops
