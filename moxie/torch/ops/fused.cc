// The fused ops: swiglu, swiglu_backward and permute, each together with the quantizer of its
// result.
#include "moxie/core/permute/permute_quantize.h"
#include "moxie/core/swiglu/swiglu_quantize.h"
#include "moxie/torch/exec.h"
#include "moxie/torch/ops/activation.h"
#include "moxie/torch/ops/quantize.h"
#include "moxie/torch/ops/register.h"
#include "moxie/torch/ops/row_weights.h"

namespace moxie::ops {
namespace {

using Text = std::string_view;
using Two = std::tuple<Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

SymShape check_h(const char* op, const Tensor& h) {
  check_float({op, "h", h});
  TORCH_CHECK_VALUE(h.dim() == 2, op, ": h must be [rows, 2 * hidden_dim], got ", h.dim(), " dims");
  const c10::SymInt cols = h.sym_size(1);
  TORCH_CHECK_VALUE((cols % 2).sym_eq(0).expect_true(__FILE__, __LINE__), op,
                    ": h must be [rows, 2 * hidden_dim], got ", cols, " columns");
  return {h.sym_size(0), cols / 2};
}

// The arguments of the swiglu ops besides h. Weights and slot_of are both present or both absent.
struct GluArgs {
  Activation activation;
  OptionalTensor weights = std::nullopt, slot_of = std::nullopt;

  bool is_weighted() const { return weights.has_value(); }
  void check(const char* op, const Tensor& h) const {
    TORCH_CHECK_VALUE(weights.has_value() == slot_of.has_value(), op,
                      ": give weights and slot_of together, or neither");
    if (weights) check_row_weights(op, *weights, *slot_of, h);
  }
  std::optional<DenseRowWeights> dense() const {
    return weights ? std::optional<DenseRowWeights>(std::in_place, *weights, *slot_of)
                   : std::nullopt;
  }
};

std::vector<Tensor> swiglu_quantize(const char* op, const Tensor& h, const OptionalTensor& offs,
                                    const QuantizeSpec& spec, const GluArgs& glu) {
  const SymShape a = check_h(op, h);
  glu.check(op, h);
  check_offs(op, offs, h);
  const auto out = allocate(forms_results({op, a, offs, spec}), h);
  if (h.is_meta()) return out;
  const DeviceScope scope(h.device());
  const Tensor from = dense(h);
  const OptionalTensor ends = dense(offs);
  const auto of = glu.dense();
  moxie::swiglu_quantize({.h = const_float_view(from),
                          .forms = forms_in(spec, ends, out),
                          .weights = of ? std::optional(of->view()) : std::nullopt,
                          .activation = glu.activation},
                         scope.exec());
  return out;
}

Two swiglu_quantize_rowwise(const Tensor& h, const OptionalTensor& offs, Text block, Text rule,
                            Text layout, Text activation) {
  constexpr const char* kOp = "swiglu_quantize_rowwise";
  return with_op(kOp, [&] {
    return two(swiglu_quantize(kOp, h, offs, parse_forms(kOp, {block, {}, rule, layout}),
                               {parse_activation(kOp, activation)}));
  });
}

Four swiglu_quantize_both(const Tensor& h, const OptionalTensor& offs, Text rowwise, Text colwise,
                          Text rule, Text layout, Text activation) {
  constexpr const char* kOp = "swiglu_quantize_both";
  return with_op(kOp, [&] {
    const QuantizeSpec spec = parse_forms(kOp, {rowwise, colwise, rule, layout});
    return four(swiglu_quantize(kOp, h, offs, spec, {parse_activation(kOp, activation)}));
  });
}

std::vector<Tensor> swiglu_quantize_packed(const Tensor& h, const OptionalTensor& offs,
                                           int64_t spec, int64_t activation,
                                           const OptionalTensor& weights,
                                           const OptionalTensor& slot_of) {
  constexpr const char* kOp = "swiglu_quantize";
  return with_op(kOp, [&] {
    return swiglu_quantize(kOp, h, offs, unpack<QuantizeSpec>(spec, kOp),
                           {unpack_activation(kOp, activation), weights, slot_of});
  });
}

std::vector<Tensor> swiglu_backward_quantize(const char* op, const Tensor& da, const Tensor& h,
                                             const OptionalTensor& offs, const QuantizeSpec& spec,
                                             const GluArgs& glu) {
  check_shape({op, "da", da}, check_h(op, h));
  check_device({op, "da", da}, h);
  TORCH_CHECK_TYPE(da.scalar_type() == h.scalar_type(), op, ": da must be ", h.scalar_type(),
                   " as h, got ", da.scalar_type());
  check_offs(op, offs, h);
  glu.check(op, h);
  Results results = forms_results({op, sym_shape(h), offs, spec});
  if (glu.is_weighted()) results.push_back(weight_gradient_of(*glu.weights));
  const auto out = allocate(results, h);
  if (h.is_meta()) return out;
  const DeviceScope scope(h.device());
  const Tensor grad = dense(da), from = dense(h);
  const OptionalTensor ends = dense(offs);
  SwigluBackwardQuantizeArgs args{.da = const_float_view(grad),
                                  .h = const_float_view(from),
                                  .forms = forms_in(spec, ends, out),
                                  .activation = glu.activation};
  const auto of = glu.dense();
  Tensor workspace;
  if (of) {
    workspace = weight_gradient_workspace(da);
    args.weights = of->gradient(out.back(), workspace);
  }
  moxie::swiglu_backward_quantize(args, scope.exec());
  return out;
}

Four swiglu_backward_quantize_both(const Tensor& da, const Tensor& h, const OptionalTensor& offs,
                                   Text rowwise, Text colwise, Text rule, Text layout,
                                   Text activation) {
  constexpr const char* kOp = "swiglu_backward_quantize_both";
  return with_op(kOp, [&] {
    const QuantizeSpec spec = parse_forms(kOp, {rowwise, colwise, rule, layout});
    return four(
        swiglu_backward_quantize(kOp, da, h, offs, spec, {parse_activation(kOp, activation)}));
  });
}

std::vector<Tensor> swiglu_backward_quantize_packed(const Tensor& da, const Tensor& h,
                                                    const OptionalTensor& offs, int64_t spec,
                                                    int64_t activation,
                                                    const OptionalTensor& weights,
                                                    const OptionalTensor& slot_of) {
  constexpr const char* kOp = "swiglu_backward_quantize";
  return with_op(kOp, [&] {
    return swiglu_backward_quantize(kOp, da, h, offs, unpack<QuantizeSpec>(spec, kOp),
                                    {unpack_activation(kOp, activation), weights, slot_of});
  });
}

std::vector<Tensor> permute_quantize(const char* op, const Tensor& x, const Tensor& slot_of,
                                     int64_t top_k, const OptionalTensor& offs,
                                     const QuantizeSpec& spec,
                                     const OptionalTensor& row_of = std::nullopt) {
  check_float({op, "x", x});
  TORCH_CHECK_VALUE(x.dim() == 2, op, ": x must be [tokens, dim], got ", x.dim(), " dims");
  TORCH_CHECK_VALUE(top_k >= 1, op, ": top_k must be 1 or more, got ", top_k);
  const c10::SymInt rows = x.sym_size(0) * top_k;
  TORCH_CHECK_TYPE(slot_of.scalar_type() == at::kInt, op, ": slot_of must be torch.int32, got ",
                   dtype_name(slot_of.scalar_type()));
  check_shape({op, "slot_of", slot_of}, {rows});
  check_device({op, "slot_of", slot_of}, x);
  if (row_of) {
    TORCH_CHECK_TYPE(row_of->scalar_type() == at::kInt, op, ": row_of must be torch.int32, got ",
                     dtype_name(row_of->scalar_type()));
    check_shape({op, "row_of", *row_of}, {rows});
    check_device({op, "row_of", *row_of}, x);
  }
  check_offs(op, offs, x);
  const auto out = allocate(forms_results({op, {rows, x.sym_size(1)}, offs, spec}), x);
  if (x.is_meta()) return out;
  const DeviceScope scope(x.device());
  const Tensor from = dense(x), slots = dense(slot_of);
  const OptionalTensor ends = dense(offs), inverse = dense(row_of);
  moxie::permute_quantize(
      {.x = const_float_view(from),
       .slot_of = const_view<int32_t>(slots),
       .top_k = top_k,
       .row_of = inverse ? std::optional(const_view<int32_t>(*inverse)) : std::nullopt,
       .forms = forms_in(spec, ends, out)},
      scope.exec());
  return out;
}

Two permute_quantize_rowwise(const Tensor& x, const Tensor& slot_of, int64_t top_k,
                             const OptionalTensor& offs, Text block, Text rule, Text layout) {
  constexpr const char* kOp = "permute_quantize_rowwise";
  return with_op(kOp, [&] {
    const QuantizeSpec spec = parse_forms(kOp, {block, {}, rule, layout});
    return two(permute_quantize(kOp, x, slot_of, top_k, offs, spec));
  });
}

Four permute_quantize_both(const Tensor& x, const Tensor& slot_of, int64_t top_k,
                           const OptionalTensor& offs, Text rowwise, Text colwise, Text rule,
                           Text layout) {
  constexpr const char* kOp = "permute_quantize_both";
  return with_op(kOp, [&] {
    const QuantizeSpec spec = parse_forms(kOp, {rowwise, colwise, rule, layout});
    return four(permute_quantize(kOp, x, slot_of, top_k, offs, spec));
  });
}

std::vector<Tensor> permute_quantize_packed(const Tensor& x, const Tensor& slot_of, int64_t top_k,
                                            const OptionalTensor& offs, int64_t spec,
                                            const OptionalTensor& row_of) {
  constexpr const char* kOp = "permute_quantize";
  return with_op(kOp, [&] {
    return permute_quantize(kOp, x, slot_of, top_k, offs, unpack<QuantizeSpec>(spec, kOp), row_of);
  });
}

void register_ops(torch::Library& m) {
  m.impl("swiglu_quantize_rowwise", TORCH_FN(swiglu_quantize_rowwise));
  m.impl("swiglu_quantize_both", TORCH_FN(swiglu_quantize_both));
  m.impl("swiglu_backward_quantize_both", TORCH_FN(swiglu_backward_quantize_both));
  m.impl("permute_quantize_rowwise", TORCH_FN(permute_quantize_rowwise));
  m.impl("permute_quantize_both", TORCH_FN(permute_quantize_both));
  m.impl("_swiglu_quantize", TORCH_FN(swiglu_quantize_packed));
  m.impl("_swiglu_backward_quantize", TORCH_FN(swiglu_backward_quantize_packed));
  m.impl("_permute_quantize", TORCH_FN(permute_quantize_packed));
}

}  // namespace

MOXIE_REGISTER_OPS(register_ops)

}  // namespace moxie::ops
