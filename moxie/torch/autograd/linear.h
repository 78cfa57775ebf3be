// One grouped linear inside an autograd node: y = x w^T and its gradients. FP8 tensors never leave
// the node, because autograd would round gradients to FP8.
#pragma once

#include "moxie/torch/autograd/node.h"
#include "moxie/torch/autograd/operands.h"

namespace moxie::ops {

struct LinearArgs {
  const Tensor& x;  // [R, K]
  const Tensor& w;  // [G, N, K]
  const OptionalTensor& offs;
  OptionalTensor bias = std::nullopt;
  OptionalTensors quantized_w = std::nullopt;  // the four tensors of quantize_weights
  std::optional<at::ScalarType> dtype = std::nullopt;
  const MxTensor* mx = nullptr;  // x, if the caller quantized it; `x` is then its placeholder
  // The forms of x that need_of_x() names, if a fused op has made them already; `x` then gives only
  // the number of rows and the dtype.
  const QuantizedForms* forms = nullptr;
  int64_t top_k = 1;  // rows per row of x, where x is tokens that are yet to be permuted
};

// Which gradients a call needs, and where dw is added.
struct LinearNeeds {
  bool dx = false, dw = false;
  OptionalTensor main_grad = std::nullopt;
};

// The names of the op and its arguments in error messages.
struct LinearNames {
  const char* op;
  const char* w = "w";
  const char* quantized_w = "quantized_w";
  const char* main_grad = "main_grad";
};

// The arguments that concern one weight.
struct WeightArgs {
  LinearNames names;
  const Tensor& w;
  const OptionalTensors& quantized_w;
  const OptionalTensor& main_grad;
};

// Check everything where the call enters and under the argument names of its op, so that no error
// comes from an inner op or only in backward.
void check_weight(const Recipe& recipe, const WeightArgs& args);
void check_linear(const Recipe& recipe, const LinearArgs& args, const LinearNames& names,
                  const OptionalTensor& main_grad);

// The arguments of decide() for this linear; x and w must have been checked.
PlanArgs plan_args(const Recipe& recipe, const LinearArgs& args, const LinearNeeds& needs);
// Sets the plan's fields that depend on quantized_w; throws if its tensors do not fit the plan.
void take_quantized_w(Plan& plan, const WeightArgs& args);

// The operands saved for backward: x and w in the forms that plan.kept_x and plan.kept_w name.
struct LinearSaved {
  Quantized x, w;
};

struct LinearStep {
  Tensor y;
  LinearSaved saved;
};

Need need_of_x(const Plan& plan);
LinearStep linear_forward(const Plan& plan, const LinearArgs& args);

struct LinearGradArgs {
  const Tensor& dy;
  const LinearSaved& saved;
  const OptionalTensor& offs;
  OptionalTensor main_grad;
  at::ScalarType x_dtype, w_dtype;
  bool needs_dx, needs_dw;
};

struct LinearGrads {
  Tensor dx, dw;  // undefined if not needed; dw also if added to main_grad
};

LinearGrads linear_backward(const Plan& plan, const LinearGradArgs& args);

// The form of w that dgrad contracts, from what forward saved.
Quantized dgrad_weights(const Plan& plan, const Quantized& saved);

// need_of_dy() says which forms of dy the gradients need; linear_dgrad() and linear_wgrad() compute
// them one at a time, from operands that are quantized already.
Need need_of_dy(bool needs_dx, bool needs_dw);
Tensor linear_dgrad(const Plan& plan, const Quantized& dy, const Quantized& w_t,
                    const OptionalTensor& offs, at::ScalarType dtype);
struct WgradArgs {
  const Quantized &dy_t, &x_t;
  c10::SymInt rows;
  const OptionalTensor& offs;
  const OptionalTensor& main_grad;
  at::ScalarType w_dtype;
};
// The gradient of w; undefined if it was added to main_grad.
Tensor linear_wgrad(const Plan& plan, const WgradArgs& args);

// Convert a LinearSaved to and from a node's list of saved variables: pack_saved() appends to the
// list, unpack_saved() reads from position `first`.
void pack_saved(torch::autograd::variable_list& list, const LinearSaved& saved);
LinearSaved unpack_saved(const torch::autograd::variable_list& list, size_t first);
inline constexpr size_t kLinearSavedCount = 4;

inline bool wants_grad(const Tensor& tensor) {
  return tensor.requires_grad() && c10::GradMode::is_enabled();
}
// Finds a tensor in a node's saved_data, where nodes keep what must not be a saved variable.
template <class Data>
OptionalTensor find_tensor(const Data& data, const char* name) {
  const auto found = data.find(name);
  return found == data.end() ? std::nullopt : OptionalTensor(found->second.toTensor());
}
inline OptionalTensor defined(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

}  // namespace moxie::ops
