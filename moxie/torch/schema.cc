// Every op of torch.ops.moxie, and nothing else. R rows (tokens) in G groups, C columns; weights
// are [G, N, K].
//
// offs    int32 [G], the exclusive end of each group of rows; tokens only
// block   rows x cols of x that share a scale: 1x32 32x1 32x32 1x128 128x1 128x32 128x128
// rule    rceil floor ceil even
// qdata   float8_e4m3fn; scale float8_e8m0fnu unless said otherwise
// _t      stored transposed: [C, R'], with room for what pads each group to the block; or [G, K, N]
//
// The overload `out` writes into tensors of exactly the shape, dtype and device that the op would
// return; a scale may be uint8 there, because inductor does not let an op write e8m0. It returns
// nothing: torch only functionalizes a custom op whose results alias none of its arguments.
#include <torch/library.h>

#include <string>
#include <vector>

namespace {

// Ops without a gradient, as argmax has none: their results never require grad, whatever x does.
std::vector<std::string> not_differentiable;
// Ops that return nothing and write an argument.
std::vector<std::string> writing;

}  // namespace

TORCH_LIBRARY(moxie, m) {
  // flexible_layout: ops copy what is strided themselves. (Inductor would, with a kernel over e8m0,
  // which it cannot generate.)
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::flexible_layout};
  const auto differentiable = [&](const char* schema) { m.def(schema, tags); };
  const auto def = [&](const std::string& schema) {
    m.def(schema.c_str(), tags);
    const std::string name = schema.substr(0, schema.find('('));
    if (schema.find("(Tensor") != schema.npos) not_differentiable.push_back(name);
    if (schema.find("!)") != schema.npos) writing.push_back(name);
  };

  // x [R, C] or [G, N, K], bf16 or f32 -> qdata as x, scale [R, C / 32] or [G, N, K / 32]
  def("quantize_rowwise(Tensor x, *, Tensor? offs=None, str block='1x32', str rule='rceil', "
      "str scale_layout='plain') -> (Tensor qdata, Tensor scale)");
  def("quantize_rowwise.out(Tensor x, *, Tensor? offs=None, str block='1x32', str rule='rceil', "
      "str scale_layout='plain', Tensor(a!) qdata, Tensor(b!) scale) -> ()");
  // -> qdata_t [C, R'] or [G, K, N], scale_t [C, R' / 32] or [G, K, N / 32]
  def("quantize_colwise(Tensor x, *, Tensor? offs=None, str block='32x1', str rule='rceil', "
      "str scale_layout='plain') -> (Tensor qdata_t, Tensor scale_t)");
  def("quantize_colwise.out(Tensor x, *, Tensor? offs=None, str block='32x1', str rule='rceil', "
      "str scale_layout='plain', Tensor(a!) qdata_t, Tensor(b!) scale_t) -> ()");
  // Both forms from one read of x.
  def("quantize_both(Tensor x, *, Tensor? offs=None, str rowwise_block='1x32', "
      "str colwise_block='32x1', str rule='rceil', str scale_layout='plain') -> "
      "(Tensor qdata, Tensor scale, Tensor qdata_t, Tensor scale_t)");
  def("quantize_both.out(Tensor x, *, Tensor? offs=None, str rowwise_block='1x32', "
      "str colwise_block='32x1', str rule='rceil', str scale_layout='plain', Tensor(a!) qdata, "
      "Tensor(b!) scale, Tensor(c!) qdata_t, Tensor(d!) scale_t) -> ()");

  // The inverses; scale_layout is that of the scales they read. x comes back [R, C] or [G, N, K],
  // bf16 (dtype=None) or f32.
  def("dequantize_rowwise(Tensor qdata, Tensor scale, *, Tensor? offs=None, str block='1x32', "
      "ScalarType? dtype=None, str scale_layout='plain') -> Tensor x");
  def("dequantize_rowwise.out(Tensor qdata, Tensor scale, *, Tensor? offs=None, "
      "str block='1x32', str scale_layout='plain', Tensor(a!) x) -> ()");
  // num_rows is R, or N of weights: the padding of qdata_t hides it.
  def("dequantize_colwise(Tensor qdata_t, Tensor scale_t, SymInt num_rows, *, Tensor? offs=None, "
      "str block='32x1', ScalarType? dtype=None, str scale_layout='plain') -> Tensor x");
  def("dequantize_colwise.out(Tensor qdata_t, Tensor scale_t, SymInt num_rows, *, "
      "Tensor? offs=None, str block='32x1', str scale_layout='plain', Tensor(a!) x) -> ()");

  // The rowwise form, its scales in from_layout -> the colwise form, straight from FP8.
  def("requantize(Tensor qdata, Tensor scale, *, Tensor? offs=None, str block='1x32', "
      "str colwise_block='32x1', str rule='rceil', str scale_layout='plain', "
      "str from_layout='plain') -> (Tensor qdata_t, Tensor scale_t)");
  def("requantize.out(Tensor qdata, Tensor scale, *, Tensor? offs=None, str block='1x32', "
      "str colwise_block='32x1', str rule='rceil', str scale_layout='plain', "
      "str from_layout='plain', Tensor(a!) qdata_t, Tensor(b!) scale_t) -> ()");

  // FP8 rowwise, scales f32: qdata as x and scale [R] or [G, N]
  def("quantize_per_row(Tensor x, *, Tensor? offs=None) -> (Tensor qdata, Tensor scale)");
  def("quantize_per_row.out(Tensor x, *, Tensor? offs=None, Tensor(a!) qdata, Tensor(b!) scale) -> "
      "()");
  // qdata_t [C, R'], groups padded to 16, and scale_t [G, C]; or [G, K, N] and [G, K]
  def("quantize_per_col(Tensor x, *, Tensor? offs=None) -> (Tensor qdata_t, Tensor scale_t)");
  def("quantize_per_col.out(Tensor x, *, Tensor? offs=None, Tensor(a!) qdata_t, Tensor(b!) "
      "scale_t) -> ()");

  // Scales of 1 x 32 between layouts. form rowwise: offs counts rows. form colwise: offs counts
  // scale columns.
  // scale [rows, cols] -> [rows', cols'] in tiles of 128 x 4; [G, rows, cols] -> [G, rows' cols']
  def("swizzle_scale(Tensor scale, *, Tensor? offs=None, str form='rowwise') -> Tensor swizzled");
  def("unswizzle_scale(Tensor swizzled, SymInt rows, SymInt cols, *, Tensor? offs=None, "
      "str form='rowwise') -> Tensor scale");
  // Scales of larger blocks <-> one per 1 x 32, [outer, k / 32] or [G, outer, k / 32]
  def("replicate_scale(Tensor scale, SymInt outer, SymInt k, *, str block, str form='rowwise') -> "
      "Tensor replicated");
  def("compact_scale(Tensor scale, *, str block, str form='rowwise') -> Tensor compact");

  // x [R, C], any dtype -> padded [R + about G * alignment, C], and each group's rows in it:
  // starts, ends int32 [G]
  differentiable(
      "pad_groups(Tensor x, Tensor offs, int alignment=32) -> "
      "(Tensor padded, Tensor starts, Tensor ends)");
  def("pad_groups.out(Tensor x, Tensor offs, int alignment=32, *, Tensor(a!) padded, "
      "Tensor(b!) starts, Tensor(c!) ends) -> ()");
  differentiable(
      "unpad_groups(Tensor padded, Tensor offs, Tensor starts, SymInt num_rows) -> Tensor x");
  def("unpad_groups.out(Tensor padded, Tensor offs, Tensor starts, SymInt num_rows, *, "
      "Tensor(a!) x) -> ()");
  def("padded_offs(Tensor offs, int alignment=32) -> Tensor padded");

  // y = x w^T by groups of rows, differentiable in x, w and bias, quantized as the recipe says
  // (recipe.h). x [R, K], w [G, N, K], bias [N] or [G, N], bf16 or f32 -> y [R, N], of the dtype
  // asked for, or the recipe's, or that of x. quantized_w: what quantize_weights made of w.
  // main_grad, f32 [G, N, K]: backward adds dw to it, and w gets no gradient of its own.
  differentiable(
      "grouped_mm(Tensor x, Tensor w, Tensor? offs=None, *, str recipe='mxfp8_rceil_128', "
      "Tensor? bias=None, ScalarType? dtype=None, Tensor[]? quantized_w=None, "
      "Tensor? main_grad=None) -> Tensor y");
  // The same for an x that is quantized already: qdata and plain scales, in the recipe's block for
  // activations. x is a placeholder with the original's shape and dtype: it gets the gradient, and
  // its values are not read.
  differentiable(
      "grouped_mm.mx(Tensor x, Tensor qdata, Tensor scale, Tensor w, Tensor? offs=None, *, "
      "str block='1x32', str recipe='mxfp8_rceil_128', Tensor? bias=None, ScalarType? dtype=None, "
      "Tensor[]? quantized_w=None, Tensor? main_grad=None) -> Tensor y");
  // The same, with what quantization loses of each operand added to stats, f64 [6, 5] (stats.h).
  differentiable(
      "grouped_mm.stats(Tensor x, Tensor w, Tensor(a!) stats, Tensor? offs=None, *, "
      "str recipe='mxfp8_rceil_128', Tensor? bias=None, ScalarType? dtype=None, "
      "Tensor[]? quantized_w=None, Tensor? main_grad=None) -> Tensor y");
  // x as `part` of a product (x w x_t w_t dy dy_t; by its dims if absent) -> f64 [5]
  def("quantization_stats(Tensor x, Tensor? offs=None, *, str recipe='mxfp8_rceil_128', "
      "str? part=None) -> Tensor stats");
  // total += addend, but not inside of a backward pass: there a checkpoint only repeats a forward
  // that was counted.
  def("_add_once_(Tensor(a!) total, Tensor addend) -> ()");
  // y = expert_mlp: grouped_mm w13 [G, 2F, D], swiglu, grouped_mm w2 [G, D, F], as one node. With
  // slot_of and row_of, x is tokens, and permute's rows of them are multiplied; with weights f32
  // [T, k] too, y is unpermute's weighted sum of the results, [T, D], differentiable in weights.
  // keep: 'h', or 'h_fp8': h between forward and backward in FP8. x_dtype: x is rounded to it
  // first, and its gradient is not. activation: that of swiglu. b13 [G, 2F] and b2 [G, D] are added
  // to the products, b2 before the weights. w13_layout: 'concatenated', gates above ups, or
  // 'interleaved', where they alternate in w13 and b13; what is quantized already is concatenated.
  differentiable(
      "expert_mlp(Tensor x, Tensor w13, Tensor w2, Tensor? offs=None, *, "
      "str recipe='mxfp8_rceil_128', Tensor[]? quantized_w13=None, Tensor[]? quantized_w2=None, "
      "Tensor? main_grad13=None, Tensor? main_grad2=None, Tensor? slot_of=None, "
      "Tensor? row_of=None, int top_k=1, Tensor? weights=None, str keep='h', "
      "ScalarType? x_dtype=None, str activation='swiglu', Tensor? b13=None, Tensor? b2=None, "
      "str w13_layout='concatenated') -> Tensor y");
  // The same, with what quantization loses of each operand of both products added to stats, f64
  // [2, 6, 5] (stats.h).
  differentiable(
      "expert_mlp.stats(Tensor x, Tensor w13, Tensor w2, Tensor(a!) stats, Tensor? offs=None, *, "
      "str recipe='mxfp8_rceil_128', Tensor[]? quantized_w13=None, Tensor[]? quantized_w2=None, "
      "Tensor? main_grad13=None, Tensor? main_grad2=None, Tensor? slot_of=None, "
      "Tensor? row_of=None, int top_k=1, Tensor? weights=None, str keep='h', "
      "ScalarType? x_dtype=None, str activation='swiglu', Tensor? b13=None, Tensor? b2=None, "
      "str w13_layout='concatenated') -> Tensor y");
  // expert_mlp over a process group, by its name: w13 and w2 hold this rank's experts, in order of
  // rank, offs [E] is of all experts, and slot_of, row_of and weights [T, k] are of this rank's
  // tokens. Every rank calls it, and its backward. wire: 'fp8', or 'unquantized': how x and dy
  // travel (docs/EXPERT_PARALLEL.md).
  differentiable(
      "expert_mlp.parallel(Tensor x, Tensor w13, Tensor w2, Tensor weights, Tensor offs, "
      "Tensor slot_of, Tensor row_of, str group, *, str recipe='mxfp8_rceil_128', str wire='fp8', "
      "Tensor[]? quantized_w13=None, Tensor[]? quantized_w2=None, Tensor? main_grad13=None, "
      "Tensor? main_grad2=None, str keep='h', ScalarType? x_dtype=None, "
      "str activation='swiglu', Tensor? b13=None, Tensor? b2=None, "
      "str w13_layout='concatenated') -> Tensor y");
  // The sum of x over the ranks of a process group; what: as errors call it
  def("_sum_over_group(Tensor x, str group, str what) -> Tensor sum");
  // a = silu(gate) * up with h [R, 2F] = [gate, up]; differentiable. activation: that, 'swiglu', or
  // gpt-oss's, 'clamped_swiglu' (core/swiglu/activation.h).
  differentiable("swiglu(Tensor h, *, str activation='swiglu') -> Tensor a");
  def("swiglu_backward(Tensor da, Tensor h, *, str activation='swiglu') -> Tensor dh");
  // The same of rows that have routing weights f32 [T, k], row r the one at slot_of[r]: weight * a;
  // and weight * dh with the gradient of the weights, the sum of da * a over each row. activation:
  // 0 swiglu, 1 clamped_swiglu.
  def("_weighted_swiglu(Tensor h, Tensor weights, Tensor slot_of, int activation=0) -> Tensor a");
  def("_weighted_swiglu_backward(Tensor da, Tensor h, Tensor weights, Tensor slot_of, "
      "int activation=0) -> (Tensor dh, Tensor dweights)");
  // What quantize_rowwise and quantize_both make of the result of swiglu, of swiglu_backward and of
  // permute, without that result in memory.
  def("swiglu_quantize_rowwise(Tensor h, *, Tensor? offs=None, str block='1x32', "
      "str rule='rceil', str scale_layout='plain', str activation='swiglu') -> "
      "(Tensor qdata, Tensor scale)");
  def("swiglu_quantize_both(Tensor h, *, Tensor? offs=None, str rowwise_block='1x32', "
      "str colwise_block='32x1', str rule='rceil', str scale_layout='plain', "
      "str activation='swiglu') -> "
      "(Tensor qdata, Tensor scale, Tensor qdata_t, Tensor scale_t)");
  def("swiglu_backward_quantize_both(Tensor da, Tensor h, *, Tensor? offs=None, "
      "str rowwise_block='1x32', str colwise_block='32x1', str rule='rceil', "
      "str scale_layout='plain', str activation='swiglu') -> "
      "(Tensor qdata, Tensor scale, Tensor qdata_t, Tensor scale_t)");
  def("permute_quantize_rowwise(Tensor x, Tensor slot_of, int top_k, *, Tensor? offs=None, "
      "str block='1x32', str rule='rceil', str scale_layout='plain') -> "
      "(Tensor qdata, Tensor scale)");
  def("permute_quantize_both(Tensor x, Tensor slot_of, int top_k, *, Tensor? offs=None, "
      "str rowwise_block='1x32', str colwise_block='32x1', str rule='rceil', "
      "str scale_layout='plain') -> "
      "(Tensor qdata, Tensor scale, Tensor qdata_t, Tensor scale_t)");

  // x [T, D], weight [E, D], bf16 or f32 -> f32 [T, E]: x weight^T; differentiable
  differentiable("gate_logits(Tensor x, Tensor weight) -> Tensor logits");
  // [dx, if x_dtype is given; the gradient of weight, if x is]
  def("_gate_logits_backward(Tensor dlogits, Tensor weight, Tensor? x, ScalarType? x_dtype) -> "
      "Tensor[]");
  // x f32 [R, C] -> bf16 [R, terms * C]: terms of x that add up to it (core/split), side by side
  def("_split_bf16(Tensor x, int[] terms) -> Tensor");
  // logits f32 [T, E] -> ids int32 [T, k], weights f32 [T, k], counts int64 [E] (core/select);
  // differentiable in logits. bias [E] takes part in the choice alone.
  differentiable(
      "_select_experts(Tensor logits, Tensor? bias, int k, *, bool sigmoid=False, "
      "bool normalize=True, float scale=1.0) -> (Tensor weights, Tensor ids, Tensor counts)");
  def("_select_experts_backward(Tensor dweights, Tensor logits, Tensor ids, bool sigmoid, "
      "bool normalize, float scale) -> Tensor dlogits");
  // scores [T, E] -> ids int32 [T, k]: the k largest of each token, equal ones by id
  def("top_k(Tensor scores, int k) -> Tensor ids");
  // ids [T, k] -> offs [E], and for R = T * k rows in order of expert, token and slot: slot_of [R],
  // the slot t * k + j that a row is a copy for, and its inverse row_of [T * k]
  def("route(Tensor ids, int num_experts) -> (Tensor offs, Tensor slot_of, Tensor row_of)");
  // x [T, D] -> rows [R, D]; differentiable in x. weights f32 [T, k] scale the rows.
  differentiable(
      "permute(Tensor x, Tensor slot_of, Tensor row_of, int top_k, *, Tensor? weights=None) -> "
      "Tensor rows");
  // rows [R, D] -> x [T, D], the weighted sum of each token's rows; differentiable in rows, weights
  differentiable(
      "unpermute(Tensor rows, Tensor slot_of, Tensor row_of, SymInt num_tokens, *, "
      "Tensor? weights=None) -> Tensor x");
  def("unpermute_weights(Tensor dout, Tensor rows, Tensor row_of, SymInt top_k) -> "
      "Tensor dweights");

  // The passes of grouped_mm, on operands as the quantizers make them: an operand without a scale
  // is in bf16 or f32 and in its natural order. dtype is that of the result, bf16 if absent.
  // scale_layout is that of the scales of tokens: if absent, swizzled on Blackwell and plain
  // elsewhere. Hopper reads quads, and puts plain ones in order first; where operands are decoded
  // it may be any. The scales of w tell theirs by their shape.
  def("grouped_fwd(Tensor x, Tensor? x_scale, Tensor w, Tensor? w_scale, Tensor? offs=None, *, "
      "str recipe, Tensor? bias=None, ScalarType? dtype=None, str? scale_layout=None) -> Tensor y");
  def("grouped_dgrad(Tensor dy, Tensor? dy_scale, Tensor w_t, Tensor? w_scale_t, "
      "Tensor? offs=None, *, str recipe, ScalarType? dtype=None, str? scale_layout=None) -> "
      "Tensor dx");
  def("grouped_wgrad(Tensor dy_t, Tensor? dy_scale_t, Tensor x_t, Tensor? x_scale_t, "
      "SymInt num_rows, Tensor? offs=None, *, str recipe, ScalarType? dtype=None, "
      "str? scale_layout=None) -> Tensor dw");
  // dw, f32, += the same
  def("grouped_wgrad_add_(Tensor(a!) dw, Tensor dy_t, Tensor? dy_scale_t, Tensor x_t, "
      "Tensor? x_scale_t, SymInt num_rows, Tensor? offs=None, *, str recipe, "
      "str? scale_layout=None) -> ()");

  // What nodes call: the passes and the quantizers with integers in place of text (bits.h). plan is
  // a PassPlan (plan/plan.h), spec a QuantizeSpec, RequantizeSpec or TokenScaleSpec (ops/).
  def("grouped_mm.quantized(Tensor x, Tensor? x_scale, Tensor w, Tensor? w_scale, Tensor? offs, "
      "int plan, *, Tensor? bias=None, ScalarType? dtype=None) -> Tensor y");
  def("grouped_dgrad.quantized(Tensor dy, Tensor? dy_scale, Tensor w_t, Tensor? w_scale_t, "
      "Tensor? offs, int plan, *, ScalarType? dtype=None) -> Tensor dx");
  def("grouped_wgrad.quantized(Tensor dy_t, Tensor? dy_scale_t, Tensor x_t, Tensor? x_scale_t, "
      "SymInt num_rows, Tensor? offs, int plan, *, ScalarType? dtype=None) -> Tensor dw");
  def("grouped_wgrad_add_.quantized(Tensor(a!) dw, Tensor dy_t, Tensor? dy_scale_t, Tensor x_t, "
      "Tensor? x_scale_t, SymInt num_rows, Tensor? offs, int plan) -> ()");
  def("_quantize(Tensor x, Tensor? offs, int spec) -> Tensor[]");
  // With routing weights f32 [T, k], of which row r has the one at slot_of[r]: the forms of weight
  // * a, and of weight * dh followed by the gradient of the weights. activation: 0 swiglu, 1
  // clamped_swiglu.
  def("_swiglu_quantize(Tensor h, Tensor? offs, int spec, int activation, *, "
      "Tensor? weights=None, Tensor? slot_of=None) -> Tensor[]");
  def("_swiglu_backward_quantize(Tensor da, Tensor h, Tensor? offs, int spec, int activation, *, "
      "Tensor? weights=None, Tensor? slot_of=None) -> Tensor[]");
  def("_permute_quantize(Tensor x, Tensor slot_of, int top_k, Tensor? offs, int spec) -> Tensor[]");
  def("_requantize(Tensor qdata, Tensor scale, Tensor? offs, int spec) -> Tensor[]");
  def("_token_scale(Tensor scale, Tensor? offs, SymInt rows, SymInt cols, int spec) -> Tensor");
  def("_dequantize_tokens(Tensor qdata, Tensor scale, int spec) -> Tensor");
  // x [R, C] -> f32 [G, C]: the rows of each group added up
  def("sum_groups(Tensor x, Tensor? offs=None) -> Tensor sums");

  // Both forms of w [G, N, K] in the blocks of a recipe and the layout of the device at hand; `out`
  // in the layout of its tensors, where the device takes either.
  def("quantize_weights(Tensor w, *, str recipe='mxfp8_rceil_128') -> "
      "(Tensor qdata, Tensor scale, Tensor qdata_t, Tensor scale_t)");
  def("quantize_weights.out(Tensor w, *, str recipe='mxfp8_rceil_128', Tensor(a!) qdata, "
      "Tensor(b!) scale, "
      "Tensor(c!) qdata_t, Tensor(d!) scale_t) -> ()");

  // Every field of a recipe in words; the names of the presets; what a call would do (explain.h).
  def("_recipe(str text) -> str");
  def("_recipe_names() -> str[]");
  def("_explain(str recipe, int n, int k, Device device, int rows, int? groups, ScalarType x, "
      "ScalarType w, bool needs_dx, bool needs_dw, bool main_grad) -> (str[] passes, int[] bytes)");
  // For tests. _counts: the recipes parsed and the plans made so far. _pretend_gpu: plans are made
  // for this kind of GPU, installed or not.
  def("_counts() -> int[]");
  def("_pretend_gpu(str kind, *, bool gpus_only=False) -> ()");

  // What core/cost says of a call of `op` on x of this shape: [flops, bytes read, bytes written]
  def("_cost(str op, int[] shape, *, ScalarType? dtype=None, int? num_groups=None, "
      "str rowwise_block='1x32', str colwise_block='32x1', str scale_layout='plain', "
      "str from_layout='plain', int alignment=32) -> float[]");
  def("_has_cuda() -> bool");
}

// Without these lines torch would give every result a grad_fn that warns, and no gradient.
TORCH_LIBRARY_IMPL(moxie, Autograd, m) {
  for (const std::string& op : not_differentiable)
    m.impl(op.c_str(), torch::CppFunction::makeFallthrough());
}

// torch's fallback for lazy conjugates and negatives takes what an op wrote from what it returns,
// and these return nothing (it would write out of bounds). They resolve their inputs themselves.
TORCH_LIBRARY_IMPL(moxie, Conjugate, m) {
  for (const std::string& op : writing) m.impl(op.c_str(), torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(moxie, Negative, m) {
  for (const std::string& op : writing) m.impl(op.c_str(), torch::CppFunction::makeFallthrough());
}
