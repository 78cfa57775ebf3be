// How tokens become rows of the experts, and rows tokens again, in forward and backward: by a
// permutation in one process (expert_mlp_local.cc), by an exchange over a process group
// (expert_mlp_group.cc). The node of expert_mlp.cc calls these steps and does the rest itself.
#pragma once

#include "moxie/torch/autograd/expert_mlp.h"

namespace moxie::ops::mlp {

using torch::autograd::variable_list;
using SavedData = ska::flat_hash_map<std::string, at::IValue>;

// The rows of y and dy before they travel: those of this process's tokens, in all experts.
struct TokenRows {
  OptionalTensor offs;
  Permutation permutation;  // none where y and dy are rows
  OptionalTensor weights;   // [T, k]
};

class TokenPath {
 public:
  virtual ~TokenPath() = default;

  // ---- forward ----
  virtual QuantizedForms x_to_experts(const Plan& plan, const Tensor& tokens) = 0;  // rowwise
  virtual Tensor y_from_experts(const Tensor& rows) = 0;
  // Appends what backward reads; restored_path() makes the path from it again.
  virtual void save(const Needs& needs, variable_list& saved, SavedData& data) const = 0;

  // ---- either ----
  virtual const OptionalTensor& offs() const = 0;  // of the rows that are multiplied here
  // The activation, with the routing weights of those rows.
  virtual RowActivation weighted(Activation activation) const = 0;
  virtual TokenRows token_rows() const = 0;

  // ---- backward ----
  // What to compute, given what this process wants: over a group also what other ranks want of it.
  virtual Needs all_needs(const Needs& own) const { return own; }
  struct Dy {
    QuantizedForms forms;
    Plan dgrad;  // the plan, with the layout of the scales in forms.rowwise
  };
  virtual Dy dy_to_experts(const Plan& plan, const Tensor& dy, Need need) const = 0;
  // x of forward in its colwise form.
  virtual QuantizedForms x_again(const Plan& plan, at::ScalarType rows_dtype) const = 0;
  struct Grads {
    Tensor x;        // [R, D] at the experts, [T, D] at the tokens
    Tensor weights;  // either undefined where it is not wanted
  };
  virtual Grads grads_from_experts(const Grads& of_rows, const Needs& own) const = 0;

  // ---- what has a row per expert, such as b2: each rank holds the rows of its experts ----
  virtual Tensor of_all_experts(const Tensor& of_own) const { return of_own; }
  // The sum over ranks, for this rank's experts.
  virtual Tensor sum_over_ranks(const Tensor& of_all) const { return of_all; }
};

// The node of expert_mlp. Without autograd (inference mode) nothing is kept.
enum class Autograd : bool { kNo, kYes };
Tensor run(Autograd autograd, const Args& args, const Call& call, TokenPath& path,
           const Needs& needs);

// Paths as backward finds them. data["path"] says which.
enum class PathKind : int64_t { kLocal, kGroup };
std::unique_ptr<TokenPath> restored_local_path(variable_list&& saved, SavedData& data);
std::unique_ptr<TokenPath> restored_group_path(variable_list&& saved, SavedData& data);

// What the caller wants gradients of.
template <Autograd kAutograd>
Needs needs_of(const Args& args, const OptionalTensor& weights) {
  if constexpr (kAutograd == Autograd::kNo) return {};
  const auto& [x, w13, w2, options] = args;
  const auto wants = [](const OptionalTensor& given) { return given && wants_grad(*given); };
  return {.x = wants_grad(x),
          .w13 = wants_grad(w13),
          .w2 = wants_grad(w2),
          .weights = wants(weights),
          .b13 = wants(options.b13),
          .b2 = wants(options.b2)};
}

}  // namespace moxie::ops::mlp
