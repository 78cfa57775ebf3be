// One grouped linear inside an autograd node: y = x w^T, and its gradients. FP8 stays inside the
// node: autograd would round gradients to it.
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
  const MxTensor* mx = nullptr;  // x as it came quantized; then x is its proxy
  // x as an op fused with what made it quantized it, in the forms of need_of_x(); then x only has
  // its rows and its dtype.
  const QuantizedForms* forms = nullptr;
  int64_t top_k = 1;  // rows that each of x stands for, where it is yet to be permuted
};

// What a call keeps for backward, and where it adds dw.
struct LinearNeeds {
  bool dx = false, dw = false;
  OptionalTensor main_grad = std::nullopt;
};

// What messages call the op and its arguments.
struct LinearNames {
  const char* op;
  const char* w = "w";
  const char* quantized_w = "quantized_w";
  const char* main_grad = "main_grad";
};

// What belongs to one weight.
struct WeightArgs {
  LinearNames names;
  const Tensor& w;
  const OptionalTensors& quantized_w;
  const OptionalTensor& main_grad;
};

// Refuse, under the names of the caller, what an op inside would refuse under its own, or only
// backward would.
void check_weight(const Recipe& recipe, const WeightArgs& args);
void check_linear(const Recipe& recipe, const LinearArgs& args, const LinearNames& names,
                  const OptionalTensor& main_grad);

// What decides about this linear; x and w were checked.
PlanArgs plan_args(const Recipe& recipe, const LinearArgs& args, const LinearNeeds& needs);
// Completes a plan with what the tensors of quantized_w say, and refuses those that do not fit it.
void take_quantized_w(Plan& plan, const WeightArgs& args);

// What backward needs: x as plan.kept_x says, and the form of w that dgrad contracts.
struct LinearSaved {
  Quantized x, w_t;
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
  Tensor dx, dw;  // undefined where not needed; dw too where it went into main_grad
};

LinearGrads linear_backward(const Plan& plan, const LinearGradArgs& args);

// The two gradients on their own, of operands that are made already.
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
// Undefined where it was added to main_grad.
Tensor linear_wgrad(const Plan& plan, const WgradArgs& args);

// A node keeps what it saves in order: pack_saved() appends, unpack_saved() takes from the front.
void pack_saved(torch::autograd::variable_list& list, const LinearSaved& saved);
LinearSaved unpack_saved(const torch::autograd::variable_list& list, size_t first);
inline constexpr size_t kLinearSavedCount = 4;

inline bool wants_grad(const Tensor& tensor) {
  return tensor.requires_grad() && c10::GradMode::is_enabled();
}
// A tensor that a node keeps beside its saved variables.
template <class Data>
OptionalTensor find_tensor(const Data& data, const char* name) {
  const auto found = data.find(name);
  return found == data.end() ? std::nullopt : OptionalTensor(found->second.toTensor());
}
inline OptionalTensor defined(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

}  // namespace moxie::ops
