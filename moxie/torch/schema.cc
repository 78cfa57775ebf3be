// The schema of every op of torch.ops.moxie. In shapes, R counts rows (tokens), G groups and C
// columns; weights are [G, N, K].
//
// offs    int32 [G], the exclusive end of each group of rows; tokens only
// block   rows x cols of x that share a scale: 1x32 32x1 32x32 1x128 128x1 128x32 128x128
// rule    rceil floor ceil even
// qdata   float8_e4m3fn; scale float8_e8m0fnu unless said otherwise
// _t      stored transposed: [C, R'], with room to pad each group to the block; or [G, K, N]
//
// The overload `out` writes into tensors that the caller passes, which must have exactly the shape,
// dtype and device of the op's results; a scale may be uint8 there, because inductor does not let
// an op write e8m0. It returns nothing: torch only functionalizes a custom op whose results alias
// none of its arguments.
#include <torch/library.h>

#include <string>
#include <vector>

namespace {

// Names of the ops that have no gradient (as argmax has none): their results never require grad,
// even if x does.
std::vector<std::string> not_differentiable;
// Names of the ops that write into an argument, which none of them returns.
std::vector<std::string> writing;

}  // namespace

TORCH_LIBRARY(moxie, m) {
  // flexible_layout lets inductor pass strided tensors as they are; the ops copy those themselves.
  // Without the tag inductor would make the copies, and it cannot generate the kernel that copies
  // e8m0.
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::flexible_layout};
  const auto differentiable = [&](const std::string& schema) {
    m.def(schema.c_str(), tags);
    const std::string name = schema.substr(0, schema.find('('));
    if (schema.find("!)") != schema.npos) writing.push_back(name);
    return name;
  };
  const auto def = [&](const std::string& schema) {
    const std::string name = differentiable(schema);
    if (schema.find("(Tensor") != schema.npos) not_differentiable.push_back(name);
  };

  // Quantizes rowwise: x [R, C] or [G, N, K], bf16 or f32 -> qdata of the same shape, scale
  // [R, C / 32] or [G, N, K / 32].
  def("quantize_rowwise(Tensor x, *, Tensor? offs=None, str block='1x32', str rule='rceil', "
      "str scale_layout='plain') -> (Tensor qdata, Tensor scale)");
  def("quantize_rowwise.out(Tensor x, *, Tensor? offs=None, str block='1x32', str rule='rceil', "
      "str scale_layout='plain', Tensor(a!) qdata, Tensor(b!) scale) -> ()");
  // Quantizes colwise: x [R, C] or [G, N, K] -> qdata_t [C, R'] or [G, K, N], scale_t [C, R' / 32]
  // or [G, K, N / 32].
  def("quantize_colwise(Tensor x, *, Tensor? offs=None, str block='32x1', str rule='rceil', "
      "str scale_layout='plain') -> (Tensor qdata_t, Tensor scale_t)");
  def("quantize_colwise.out(Tensor x, *, Tensor? offs=None, str block='32x1', str rule='rceil', "
      "str scale_layout='plain', Tensor(a!) qdata_t, Tensor(b!) scale_t) -> ()");
  // Makes both the rowwise and the colwise form, from one read of x.
  def("quantize_both(Tensor x, *, Tensor? offs=None, str rowwise_block='1x32', "
      "str colwise_block='32x1', str rule='rceil', str scale_layout='plain') -> "
      "(Tensor qdata, Tensor scale, Tensor qdata_t, Tensor scale_t)");
  def("quantize_both.out(Tensor x, *, Tensor? offs=None, str rowwise_block='1x32', "
      "str colwise_block='32x1', str rule='rceil', str scale_layout='plain', Tensor(a!) qdata, "
      "Tensor(b!) scale, Tensor(c!) qdata_t, Tensor(d!) scale_t) -> ()");

  // Dequantizes the rowwise form to x [R, C] or [G, N, K], bf16 (dtype=None) or f32. scale_layout
  // is the layout of the given scales.
  def("dequantize_rowwise(Tensor qdata, Tensor scale, *, Tensor? offs=None, str block='1x32', "
      "ScalarType? dtype=None, str scale_layout='plain') -> Tensor x");
  def("dequantize_rowwise.out(Tensor qdata, Tensor scale, *, Tensor? offs=None, "
      "str block='1x32', str scale_layout='plain', Tensor(a!) x) -> ()");
  // Dequantizes the colwise form. num_rows is R of tokens, which the padding of qdata_t hides, or N
  // of weights.
  def("dequantize_colwise(Tensor qdata_t, Tensor scale_t, SymInt num_rows, *, Tensor? offs=None, "
      "str block='32x1', ScalarType? dtype=None, str scale_layout='plain') -> Tensor x");
  def("dequantize_colwise.out(Tensor qdata_t, Tensor scale_t, SymInt num_rows, *, "
      "Tensor? offs=None, str block='32x1', str scale_layout='plain', Tensor(a!) x) -> ()");

  // Turns the rowwise form, whose scales are in from_layout, into the colwise form, without bf16 in
  // between.
  def("requantize(Tensor qdata, Tensor scale, *, Tensor? offs=None, str block='1x32', "
      "str colwise_block='32x1', str rule='rceil', str scale_layout='plain', "
      "str from_layout='plain') -> (Tensor qdata_t, Tensor scale_t)");
  def("requantize.out(Tensor qdata, Tensor scale, *, Tensor? offs=None, str block='1x32', "
      "str colwise_block='32x1', str rule='rceil', str scale_layout='plain', "
      "str from_layout='plain', Tensor(a!) qdata_t, Tensor(b!) scale_t) -> ()");

  // For the recipe fp8_rowwise: x -> qdata of the same shape and one f32 scale per row, [R] or
  // [G, N].
  def("quantize_per_row(Tensor x, *, Tensor? offs=None) -> (Tensor qdata, Tensor scale)");
  def("quantize_per_row.out(Tensor x, *, Tensor? offs=None, Tensor(a!) qdata, Tensor(b!) scale) -> "
      "()");
  // For the recipe fp8_rowwise: x -> qdata_t [C, R'], each group padded to a multiple of 16 rows,
  // and f32 scale_t [G, C]; for weights [G, K, N] and [G, K].
  def("quantize_per_col(Tensor x, *, Tensor? offs=None) -> (Tensor qdata_t, Tensor scale_t)");
  def("quantize_per_col.out(Tensor x, *, Tensor? offs=None, Tensor(a!) qdata_t, Tensor(b!) "
      "scale_t) -> ()");

  // Convert scales of 1x32 blocks between the plain and the swizzled layout: scale [rows, cols] <->
  // [rows', cols'] in tiles of 128 x 4; [G, rows, cols] <-> [G, rows' cols']. offs count rows if
  // form is rowwise, and scale columns if it is colwise.
  def("swizzle_scale(Tensor scale, *, Tensor? offs=None, str form='rowwise') -> Tensor swizzled");
  def("unswizzle_scale(Tensor swizzled, SymInt rows, SymInt cols, *, Tensor? offs=None, "
      "str form='rowwise') -> Tensor scale");
  // Convert scales of larger blocks to one scale per 1 x 32 elements, [outer, k / 32] or
  // [G, outer, k / 32], and back.
  def("replicate_scale(Tensor scale, SymInt outer, SymInt k, *, str block, str form='rowwise') -> "
      "Tensor replicated");
  def("compact_scale(Tensor scale, *, str block, str form='rowwise') -> Tensor compact");

  // x [R, C], any dtype -> padded [R + about G * alignment, C], where group g has the rows from
  // starts[g] to ends[g], int32 [G]
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

  // y = x w^T for each group of rows, differentiable in x, w and bias, quantized as the recipe says
  // (recipe.h). x [R, K], w [G, N, K], bias [N] or [G, N], bf16 or f32 -> y [R, N]; its dtype is
  // `dtype`, or else the recipe's `out`, or else that of x. quantized_w: the results of
  // quantize_weights(w). main_grad, f32 [G, N, K]: backward adds dw to it, and w gets no gradient
  // of its own.
  differentiable(
      "grouped_mm(Tensor x, Tensor w, Tensor? offs=None, *, str recipe='mxfp8_rceil_128', "
      "Tensor? bias=None, ScalarType? dtype=None, Tensor[]? quantized_w=None, "
      "Tensor? main_grad=None) -> Tensor y");
  // grouped_mm of an x that is quantized already: qdata and plain scales, in the recipe's block for
  // activations. x is a placeholder with the original's shape and dtype: it gets the gradient, and
  // its values are not read.
  differentiable(
      "grouped_mm.mx(Tensor x, Tensor qdata, Tensor scale, Tensor w, Tensor? offs=None, *, "
      "str block='1x32', str recipe='mxfp8_rceil_128', Tensor? bias=None, ScalarType? dtype=None, "
      "Tensor[]? quantized_w=None, Tensor? main_grad=None) -> Tensor y");
  // grouped_mm that also measures what quantization loses of each operand, and adds the result to
  // stats, f64 [6, 5] (stats.h).
  differentiable(
      "grouped_mm.stats(Tensor x, Tensor w, Tensor(a!) stats, Tensor? offs=None, *, "
      "str recipe='mxfp8_rceil_128', Tensor? bias=None, ScalarType? dtype=None, "
      "Tensor[]? quantized_w=None, Tensor? main_grad=None) -> Tensor y");
  // What quantization loses of x if x is this operand of a product -> f64 [5] (stats.h). part: x,
  // w, x_t, w_t, dy or dy_t; if absent, w for an x of three dims, else x.
  def("quantization_stats(Tensor x, Tensor? offs=None, *, str recipe='mxfp8_rceil_128', "
      "str? part=None) -> Tensor stats");
  // total += addend, but nothing inside a backward pass: there, activation checkpointing repeats a
  // forward pass, which has added its share already.
  def("_add_once_(Tensor(a!) total, Tensor addend) -> ()");
  // The MLP of each group as one node: grouped_mm by w13 [G, 2F, D], swiglu, grouped_mm by w2
  // [G, D, F]. x is rows [R, D], or with slot_of and row_of tokens [T, D], which the op permutes
  // into rows. With weights, f32 [T, k], the result is not the rows but unpermute's weighted sum of
  // them, y [T, D], differentiable in weights too. keep: how h waits for backward, 'h' as it is or
  // 'h_fp8' in FP8. x_dtype: rounds x to it first; dx has the dtype of x. activation: as in swiglu.
  // b13 [G, 2F] and b2 [G, D] are added to the products, b2 before the weights multiply.
  // w13_layout: the rows of w13 and b13 are 'concatenated', gates above ups, or 'interleaved', one
  // of each in turn; quantized_w13 is concatenated in either case.
  differentiable(
      "expert_mlp(Tensor x, Tensor w13, Tensor w2, Tensor? offs=None, *, "
      "str recipe='mxfp8_rceil_128', Tensor[]? quantized_w13=None, Tensor[]? quantized_w2=None, "
      "Tensor? main_grad13=None, Tensor? main_grad2=None, Tensor? slot_of=None, "
      "Tensor? row_of=None, int top_k=1, Tensor? weights=None, str keep='h', "
      "ScalarType? x_dtype=None, str activation='swiglu', Tensor? b13=None, Tensor? b2=None, "
      "str w13_layout='concatenated') -> Tensor y");
  // expert_mlp that also measures what quantization loses of each operand of both products, and
  // adds the result to stats, f64 [2, 6, 5] (stats.h).
  differentiable(
      "expert_mlp.stats(Tensor x, Tensor w13, Tensor w2, Tensor(a!) stats, Tensor? offs=None, *, "
      "str recipe='mxfp8_rceil_128', Tensor[]? quantized_w13=None, Tensor[]? quantized_w2=None, "
      "Tensor? main_grad13=None, Tensor? main_grad2=None, Tensor? slot_of=None, "
      "Tensor? row_of=None, int top_k=1, Tensor? weights=None, str keep='h', "
      "ScalarType? x_dtype=None, str activation='swiglu', Tensor? b13=None, Tensor? b2=None, "
      "str w13_layout='concatenated') -> Tensor y");
  // expert_mlp over the process group of this name. w13 and w2 hold this rank's experts: the first
  // ranks have the first experts. offs [E] are the ends of this rank's rows for each expert of the
  // group, and slot_of, row_of and weights [T, k] belong to this rank's tokens. Every rank must
  // call it, and run its backward. wire: x and dy travel as 'fp8' or 'unquantized'
  // (docs/EXPERT_PARALLEL.md).
  differentiable(
      "expert_mlp.parallel(Tensor x, Tensor w13, Tensor w2, Tensor weights, Tensor offs, "
      "Tensor slot_of, Tensor row_of, str group, *, str recipe='mxfp8_rceil_128', str wire='fp8', "
      "Tensor[]? quantized_w13=None, Tensor[]? quantized_w2=None, Tensor? main_grad13=None, "
      "Tensor? main_grad2=None, str keep='h', ScalarType? x_dtype=None, "
      "str activation='swiglu', Tensor? b13=None, Tensor? b2=None, "
      "str w13_layout='concatenated') -> Tensor y");
  // The same over memory that the ranks share (moxie.symmetric makes it), without the host. memory:
  // this rank's; status: int64 [5] on the host, pinned; peers: the address here of every rank's;
  // capacity: _exchange_capacity's; limits: rows of a rank's experts and tokens it receives.
  differentiable(
      "expert_mlp.symmetric(Tensor x, Tensor w13, Tensor w2, Tensor weights, Tensor offs, "
      "Tensor slot_of, Tensor row_of, Tensor memory, Tensor status, int[] peers, int[] capacity, "
      "int[] limits, int rank, int timeout_ms, str group, *, str recipe='mxfp8_rceil_128', "
      "str wire='fp8', Tensor[]? quantized_w13=None, Tensor[]? quantized_w2=None, "
      "Tensor? main_grad13=None, Tensor? main_grad2=None, str keep='h', "
      "ScalarType? x_dtype=None, str activation='swiglu', Tensor? b13=None, Tensor? b2=None, "
      "str w13_layout='concatenated') -> Tensor y");
  // What a layer needs of shared memory: experts, rows, and bytes of tokens, of rows and of an
  // expert's bias. bias: whether the experts have one
  def("_exchange_capacity(int ranks, int experts, int dim, int[] limits, ScalarType dtype, *, "
      "str recipe, str wire, bool bias) -> int[]");
  // The bytes of memory with that capacity
  def("_exchange_bytes(int ranks, int[] capacity) -> int");
  // Raises if the exchange has failed; does not wait for the device.
  def("_exchange_check(Tensor status, int rank, int ranks, int timeout_ms, str group) -> ()");
  // The sum of x over the ranks of a process group; what: as errors call it
  def("_sum_over_group(Tensor x, str group, str what) -> Tensor sum");
  // a = silu(gate) * up, where h [R, 2F] = [gate, up]; differentiable. activation: 'swiglu', as
  // written here, or 'clamped_swiglu', that of gpt-oss (core/swiglu/activation.h).
  differentiable("swiglu(Tensor h, *, str activation='swiglu') -> Tensor a");
  def("swiglu_backward(Tensor da, Tensor h, *, str activation='swiglu') -> Tensor dh");
  // swiglu and swiglu_backward of rows that have routing weights: f32 [T, k], row r the one at
  // slot_of[r]. Forward gives weight * a; backward gives weight * dh, and the gradient of the
  // weights, which is the sum of da * a over each row. activation: 0 swiglu, 1 clamped_swiglu.
  def("_weighted_swiglu(Tensor h, Tensor weights, Tensor slot_of, int activation=0) -> Tensor a");
  def("_weighted_swiglu_backward(Tensor da, Tensor h, Tensor weights, Tensor slot_of, "
      "int activation=0) -> (Tensor dh, Tensor dweights)");
  // Fused ops: what quantize_rowwise or quantize_both makes of the result of swiglu,
  // swiglu_backward or permute, without writing that result to memory.
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

  // A router's logits, x weight^T: x [T, D], weight [E, D], bf16 or f32 -> f32 [T, E];
  // differentiable.
  differentiable("gate_logits(Tensor x, Tensor weight) -> Tensor logits");
  // The gradients of gate_logits: dx if x_dtype is given, then that of weight if x is given. add,
  // another gradient of x, is added to dx.
  def("_gate_logits_backward(Tensor dlogits, Tensor weight, Tensor? x, ScalarType? x_dtype, "
      "Tensor? add=None) -> Tensor[]");
  // Splits f32 x [R, C] into bf16 terms that add up to it (core/split); writes those asked for side
  // by side, bf16 [R, terms * C].
  def("_split_bf16(Tensor x, int[] terms) -> Tensor");
  // A router's choice (core/select): logits f32 [T, E] -> weights f32 [T, k], ids int32 [T, k],
  // counts int64 [E]; differentiable in logits. bias [E] changes which experts are chosen, not the
  // weights.
  differentiable(
      "_select_experts(Tensor logits, Tensor? bias, int k, *, bool sigmoid=False, "
      "bool normalize=True, float scale=1.0) -> (Tensor weights, Tensor ids, Tensor counts)");
  def("_select_experts_backward(Tensor dweights, Tensor logits, Tensor ids, bool sigmoid, "
      "bool normalize, float scale) -> Tensor dlogits");
  // _select_experts of the logits x weight^T, as one node
  differentiable(
      "_choose_experts(Tensor x, Tensor weight, Tensor? bias, int k, bool sigmoid=False, "
      "bool normalize=True, float scale=1.0) -> (Tensor weights, Tensor ids, Tensor counts)");
  // _select_experts whose counts are added to load, int64 [E], if that is given. Inside a backward
  // pass they are not, as in _add_once_.
  def("_select_experts_once(Tensor logits, Tensor? bias, int k, bool sigmoid, bool normalize, "
      "float scale, Tensor(a!)? load) -> (Tensor weights, Tensor ids)");
  // _choose_experts for a layer in eager mode, which costs the host less: as _select_experts_once,
  // and x is returned for the experts, so that one node adds their gradient of x to the router's.
  differentiable(
      "_choose_experts_once(Tensor(a) x, Tensor weight, Tensor? bias, int k, bool sigmoid, "
      "bool normalize, float scale, Tensor(b!)? load) -> (Tensor weights, Tensor ids, "
      "Tensor(a) same_x)");
  // The k experts with the largest scores of each token, equal ones by id: scores [T, E] -> ids
  // int32 [T, k].
  def("top_k(Tensor scores, int k) -> Tensor ids");
  // Orders the R = T * k rows of ids [T, k] by expert, then token, then slot -> offs [E]; slot_of
  // [R], the slot t * k + j that each row is a copy for; row_of [T * k], the inverse of slot_of.
  def("route(Tensor ids, int num_experts) -> (Tensor offs, Tensor slot_of, Tensor row_of)");
  // Copies tokens to rows in the order of route: x [T, D] -> rows [R, D]; differentiable in x.
  // weights, f32 [T, k], scale the rows.
  differentiable(
      "permute(Tensor x, Tensor slot_of, Tensor row_of, int top_k, *, Tensor? weights=None) -> "
      "Tensor rows");
  // The weighted sum of each token's rows: rows [R, D] -> x [T, D]; differentiable in rows and
  // weights.
  differentiable(
      "unpermute(Tensor rows, Tensor slot_of, Tensor row_of, SymInt num_tokens, *, "
      "Tensor? weights=None) -> Tensor x");
  def("unpermute_weights(Tensor dout, Tensor rows, Tensor row_of, SymInt top_k) -> "
      "Tensor dweights");

  // The three passes of grouped_mm as ops of their own, on operands as the quantizers make them; an
  // operand without a scale is in bf16 or f32, and not transposed. dtype: that of the result, bf16
  // if absent. scale_layout: the layout of the scales of tokens; if absent, swizzled on Blackwell
  // and plain elsewhere. Hopper's kernel reads quads, and plain scales are converted to them first;
  // operands that are decoded may have any layout. The layout of w's scales follows from their
  // shape.
  def("grouped_fwd(Tensor x, Tensor? x_scale, Tensor w, Tensor? w_scale, Tensor? offs=None, *, "
      "str recipe, Tensor? bias=None, ScalarType? dtype=None, str? scale_layout=None) -> Tensor y");
  def("grouped_dgrad(Tensor dy, Tensor? dy_scale, Tensor w_t, Tensor? w_scale_t, "
      "Tensor? offs=None, *, str recipe, ScalarType? dtype=None, str? scale_layout=None) -> "
      "Tensor dx");
  def("grouped_wgrad(Tensor dy_t, Tensor? dy_scale_t, Tensor x_t, Tensor? x_scale_t, "
      "SymInt num_rows, Tensor? offs=None, *, str recipe, ScalarType? dtype=None, "
      "str? scale_layout=None) -> Tensor dw");
  // Adds grouped_wgrad's result to dw, which is f32.
  def("grouped_wgrad_add_(Tensor(a!) dw, Tensor dy_t, Tensor? dy_scale_t, Tensor x_t, "
      "Tensor? x_scale_t, SymInt num_rows, Tensor? offs=None, *, str recipe, "
      "str? scale_layout=None) -> ()");

  // The passes and the quantizers as autograd nodes call them, with integers in place of text
  // (bits.h). plan is a PassPlan (plan/plan.h), spec a QuantizeSpec, RequantizeSpec or
  // TokenScaleSpec (ops/).
  def("grouped_mm.quantized(Tensor x, Tensor? x_scale, Tensor w, Tensor? w_scale, Tensor? offs, "
      "int plan, *, Tensor? bias=None, ScalarType? dtype=None) -> Tensor y");
  def("grouped_dgrad.quantized(Tensor dy, Tensor? dy_scale, Tensor w_t, Tensor? w_scale_t, "
      "Tensor? offs, int plan, *, ScalarType? dtype=None) -> Tensor dx");
  def("grouped_wgrad.quantized(Tensor dy_t, Tensor? dy_scale_t, Tensor x_t, Tensor? x_scale_t, "
      "SymInt num_rows, Tensor? offs, int plan, *, ScalarType? dtype=None) -> Tensor dw");
  def("grouped_wgrad_add_.quantized(Tensor(a!) dw, Tensor dy_t, Tensor? dy_scale_t, Tensor x_t, "
      "Tensor? x_scale_t, SymInt num_rows, Tensor? offs, int plan) -> ()");
  def("_quantize(Tensor x, Tensor? offs, int spec) -> Tensor[]");
  // The forms of a and of dh, or with routing weights, f32 [T, k], those of weight * a and of
  // weight * dh; then the backward op also returns the gradient of the weights, last. Row r has the
  // weight at slot_of[r]. activation: 0 swiglu, 1 clamped_swiglu.
  def("_swiglu_quantize(Tensor h, Tensor? offs, int spec, int activation, *, "
      "Tensor? weights=None, Tensor? slot_of=None) -> Tensor[]");
  def("_swiglu_backward_quantize(Tensor da, Tensor h, Tensor? offs, int spec, int activation, *, "
      "Tensor? weights=None, Tensor? slot_of=None) -> Tensor[]");
  def("_permute_quantize(Tensor x, Tensor slot_of, int top_k, Tensor? offs, int spec, *, "
      "Tensor? row_of=None) -> Tensor[]");
  def("_requantize(Tensor qdata, Tensor scale, Tensor? offs, int spec) -> Tensor[]");
  def("_token_scale(Tensor scale, Tensor? offs, SymInt rows, SymInt cols, int spec) -> Tensor");
  def("_dequantize_tokens(Tensor qdata, Tensor scale, int spec) -> Tensor");
  // The sum of each group's rows: x [R, C] -> f32 [G, C]
  def("sum_groups(Tensor x, Tensor? offs=None) -> Tensor sums");

  // Both forms of w [G, N, K] in the blocks of a recipe, with scales in the layout that suits the
  // device of w. `out` writes the layout that its tensors have, if the device can read it.
  def("quantize_weights(Tensor w, *, str recipe='mxfp8_rceil_128') -> "
      "(Tensor qdata, Tensor scale, Tensor qdata_t, Tensor scale_t)");
  def("quantize_weights.out(Tensor w, *, str recipe='mxfp8_rceil_128', Tensor(a!) qdata, "
      "Tensor(b!) scale, "
      "Tensor(c!) qdata_t, Tensor(d!) scale_t) -> ()");

  // _recipe: every field of a recipe as text. _recipe_names: the presets. _explain: the plan of a
  // call (explain.h).
  def("_recipe(str text) -> str");
  def("_recipe_names() -> str[]");
  def("_explain(str recipe, int n, int k, Device device, int rows, int? groups, ScalarType x, "
      "ScalarType w, bool needs_dx, bool needs_dw, bool main_grad) -> (str[] passes, int[] bytes)");
  // For tests. _counts: how many recipes were parsed and plans made so far. _pretend_gpu: from now
  // on, plans are made for this kind of GPU, whether there is one or not.
  def("_counts() -> int[]");
  def("_pretend_gpu(str kind, *, bool gpus_only=False) -> ()");

  // The cost (core/cost) of calling `op` on x of this shape: [flops, bytes read, bytes written]
  def("_cost(str op, int[] shape, *, ScalarType? dtype=None, int? num_groups=None, "
      "str rowwise_block='1x32', str colwise_block='32x1', str scale_layout='plain', "
      "str from_layout='plain', int alignment=32) -> float[]");
  def("_has_cuda() -> bool");
}

// Without these lines torch would give every result a grad_fn that warns in backward and yields no
// gradient.
TORCH_LIBRARY_IMPL(moxie, Autograd, m) {
  for (const std::string& op : not_differentiable)
    m.impl(op.c_str(), torch::CppFunction::makeFallthrough());
}

// torch's fallback for lazy conjugates and negatives expects an op to return what it wrote. These
// ops do not, so the fallback would write out of bounds; they resolve such inputs themselves.
TORCH_LIBRARY_IMPL(moxie, Conjugate, m) {
  for (const std::string& op : writing) m.impl(op.c_str(), torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(moxie, Negative, m) {
  for (const std::string& op : writing) m.impl(op.c_str(), torch::CppFunction::makeFallthrough());
}
