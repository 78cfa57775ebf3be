// The operands of the three passes, made from x, w and dy as a recipe says.
#pragma once

#include "moxie/core/gemm/product.h"
#include "moxie/torch/gemm/path.h"
#include "moxie/torch/mx_tensor.h"
#include "moxie/torch/view.h"

namespace moxie::ops {

struct Permutation;  // ops.h

// A tensor as a pass takes it. Without a scale it is in high precision and in its natural order.
struct Quantized {
  Tensor data;
  OptionalTensor scale;
};

// Which form an operand of a pass has, and in which block. a is x, dy or dy_t; b is w, w_t or x_t.
struct OperandForm {
  Form form;
  Block block;
};
OperandForm form_of_a(const Recipe& recipe, Pass pass);
OperandForm form_of_b(const Recipe& recipe, Pass pass);

struct Forms {
  Quantized rowwise;  // contracted over columns
  Quantized colwise;  // contracted over rows, stored transposed
};

enum class Need : uint8_t { kRowwise, kColwise, kBoth };

// How recipe, device and sizes of w decide the operands.
struct Plan {
  Recipe recipe;
  std::string text;  // the recipe's
  Path path;
  ScaleLayout layout = ScaleLayout::kPlain;  // of the scales that are made
};

// w must be [G, N, K]; messages call it `name`.
Plan make_plan(std::string_view recipe, const Tensor& w, const char* op, const char* name = "w");

// e8m0, its bytes (as a weight cache under inductor has them), or f32 where rows are scaled.
void check_scale(const Input& scale, Scaling scaling);

// The layout of the scales of w, by their shape: swizzled ones are [G, bytes], plain ones
// [G, rows, cols], and quads have four columns. (Plain ones of four are quads, byte for byte.) On
// all paths but Blackwell's they may come in another layout than they are made in: a weight cache
// may come from another device.
ScaleLayout layout_of_weights(Path path, const Tensor& scale, const Tensor& qdata, OperandForm as);
// Of both forms: where one could be either, the other tells.
ScaleLayout layout_of_weights(const Plan& plan, const Forms& w);

// x or dy [R, C]. The blocks of the colwise form are those of wgrad_x or wgrad_dy.
enum class Role : uint8_t { kX, kDy };
Forms quantize_tokens(const Plan& plan, const Tensor& x, const OptionalTensor& offs, Role role,
                      Need need);
// The same for what swiglu, swiglu_backward and permute give, in one op with it. Only where
// fuses(): in blocks, and no form of it in bf16. need is rowwise or both, for swiglu_backward both.
bool fuses(const Plan& plan, const Tensor& from, Need need);
Forms quantize_swiglu(const Plan& plan, const Tensor& h, const OptionalTensor& offs, Need need);
Forms quantize_swiglu_backward(const Plan& plan, const Tensor& da, const Tensor& h,
                               const OptionalTensor& offs);
Forms quantize_permuted(const Plan& plan, const Tensor& x, const Permutation& permutation,
                        const OptionalTensor& offs, Need need);
// w [G, N, K]
Forms quantize_weights(const Plan& plan, const Tensor& w, Need need);
// What quantize_weights returns: qdata, scale, qdata_t, scale_t.
Results quantized_weights_results(const Plan& plan, const Tensor& w);
// The same into tensors that are there already.
void quantize_weights_into(const Plan& plan, const Tensor& w, const Forms& out);
// The colwise form of x from what was kept for it: its rowwise form, or x where rows are scaled.
Quantized requantize_tokens(const Plan& plan, const Quantized& x, const OptionalTensor& offs);

// The operands of an x that came quantized, in any block that replicated scales turn into that of
// the recipe: what forward reads, with swizzled scales on Blackwell and plain ones elsewhere, and
// what wgrad reads (of its qdata and scale, which were kept).
void check_mx(const Plan& plan, const char* op, const MxTensor& x);
Quantized rowwise_mx(const Plan& plan, const MxTensor& x, const OptionalTensor& offs);
Quantized colwise_mx(const Plan& plan, const Quantized& x, std::string_view block,
                     const OptionalTensor& offs);

// Whether x is saved for backward in the colwise form, which wgrad reads, or in the rowwise form,
// to be requantized. A colwise group is padded to the block, in a buffer sized for the worst case
// (docs/NUMERICS.md, section 9).
bool saves_colwise(const Recipe& recipe, const c10::SymInt& rows, const c10::SymInt& groups);

}  // namespace moxie::ops
