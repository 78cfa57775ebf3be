// How tokens become rows of the experts, and rows tokens again, in forward and backward: by a
// permutation in one process (expert_mlp_local.cc), by an exchange over a process group
// (expert_mlp_group.cc) or over symmetric memory (expert_mlp_symmetric.cc). The node of
// expert_mlp.cc calls these steps and does the rest itself.
#pragma once

#include "moxie/torch/autograd/expert_mlp.h"

namespace moxie::ops::mlp {

using torch::autograd::variable_list;
using SavedData = ska::flat_hash_map<std::string, at::IValue>;

// Maps this process's tokens to their rows (of y and dy) for the experts of all ranks, before any
// rows are exchanged.
struct TokenRows {
  OptionalTensor offs;
  Permutation permutation;  // empty if y and dy are rows already
  OptionalTensor weights;   // [T, k]
};

class TokenPath {
 public:
  virtual ~TokenPath() = default;

  // ---- forward ----
  virtual QuantizedForms x_to_experts(const Plan& plan, const Tensor& tokens) = 0;  // rowwise
  virtual Tensor y_from_experts(const Tensor& rows) = 0;
  // Appends the tensors that backward reads to `saved`, and numbers to `data`; restored_path()
  // builds the path again from both.
  virtual void save(const Needs& needs, variable_list& saved, SavedData& data) const = 0;

  // ---- either ----
  virtual const OptionalTensor& offs() const = 0;  // ends of the rows that this process multiplies
  // The activation together with the routing weights of the rows that this process multiplies.
  virtual RowActivation weighted(Activation activation) const = 0;
  virtual TokenRows token_rows() const = 0;

  // ---- backward ----
  // The gradients to compute, given those that this process wants: over a group also those that any
  // other rank wants, as this rank computes them for it.
  virtual Needs all_needs(const Needs& own) const { return own; }
  // Backward needs b2 of all experts where the tokens are, and sums for its gradient where the
  // experts are. Over a group, the process of an expert has its b2, and that of a token its dy.
  struct Bias {
    Tensor b2;   // [G, D]. given: of this process's experts; returned: of all
    Tensor db2;  // f32 [G, D]. given: over this process's tokens, for all experts; returned: over
                 // all tokens, for this process's experts. Either is undefined if not wanted.
  };
  struct Dy {
    QuantizedForms forms;
    Plan dgrad;  // the plan of dgrad: it has the layout of the scales in forms.rowwise
    Bias bias;
  };
  virtual Dy dy_to_experts(const Plan& plan, const Tensor& dy, Need need,
                           const Bias& bias) const = 0;
  // Makes the colwise form of forward's x, for wgrad of w13.
  virtual QuantizedForms x_again(const Plan& plan, at::ScalarType rows_dtype) const = 0;
  struct Grads {
    Tensor x;        // [R, D] at the experts, [T, D] at the tokens
    Tensor weights;  // x or weights is undefined if not wanted
  };
  virtual Grads grads_from_experts(const Grads& of_rows, const Needs& own) const = 0;
};

// Runs the autograd node of expert_mlp, or with kNo (inference mode) only its forward, which keeps
// nothing.
enum class Autograd : bool { kNo, kYes };
Tensor run(Autograd autograd, const Args& args, const Call& call, TokenPath& path,
           const Needs& needs);

// Paths as backward finds them. data["path"] says which.
enum class PathKind : int64_t { kLocal, kGroup, kSymmetric };
std::unique_ptr<TokenPath> restored_local_path(variable_list&& saved, SavedData& data);
std::unique_ptr<TokenPath> restored_group_path(variable_list&& saved, SavedData& data);
std::unique_ptr<TokenPath> restored_symmetric_path(variable_list&& saved, SavedData& data);

// Which arguments the caller wants gradients of.
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
