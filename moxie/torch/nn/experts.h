// GroupedExperts: the MLPs of all experts, with weights w13 [E, 2F, D] (the gate's rows above the
// up projection's) and w2 [E, D, F]. Options can have them stored interleaved or transposed.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <optional>
#include <string>
#include <vector>

#include "moxie/torch/nn/quantizable.h"
#include "moxie/torch/ops.h"
#include "moxie/torch/view.h"
#include "moxie/torch/weight_cache.h"

namespace moxie::nn {

struct ExpertsOptions {
  int64_t dim = 0;
  int64_t hidden_dim = 0;
  int64_t num_experts = 1;
  std::string recipe = "mxfp8_rceil_128";
  bool weight_cache = false;                // if true, call refresh() after every optimizer step
  bool collect_stats = false;               // quantizable.h
  std::string keep = "h";                   // how h waits for backward: h, or h_fp8 (docs/MOE.md)
  std::string activation = "swiglu";        // or clamped_swiglu
  bool bias = false;                        // b13 [E, 2F] and b2 [E, D]
  std::string w13_layout = "concatenated";  // or interleaved: rows of gate and up alternate
  bool transposed = false;                  // w13 is stored [E, D, 2F], w2 [E, F, D]
  at::TensorOptions tensor = {};
};

// One matrix per expert, given as one stacked tensor or as a list of matrices.
struct Matrices {
  Matrices(at::Tensor stacked) : tensor(std::move(stacked)) {}
  Matrices(const std::vector<at::Tensor>& one_by_one);
  at::Tensor tensor;  // [E, .., ..]
};

// Weights to load, as another model stores them. Absent ones leave the module's unchanged.
struct ExpertWeights {
  std::optional<Matrices> w1 = std::nullopt;                        // the gate, [E, F, D]; needs w3
  std::optional<Matrices> w3 = std::nullopt;                        // the up projection, [E, F, D]
  std::optional<Matrices> w13 = std::nullopt;                       // [E, 2F, D]
  std::optional<Matrices> w2 = std::nullopt;                        // [E, D, F]
  std::optional<at::Tensor> b13 = std::nullopt, b2 = std::nullopt;  // [E, 2F], [E, D]
  bool transposed = false;   // all matrices are [in, out], as x.matmul(w) takes them
  bool interleaved = false;  // rows of gate and up alternate in w13 and b13
};

class GroupedExpertsImpl : public torch::nn::Module, public Quantizable {
 public:
  explicit GroupedExpertsImpl(const ExpertsOptions& options);

  // Rows [R, D] in groups -> [R, D]; without offs all rows go to one expert. With a permutation x
  // is tokens [T, D], which forward permutes into rows first; with weights f32 [T, k] too, the
  // result is the weighted sum of each token's rows, [T, D].
  at::Tensor forward(const at::Tensor& x, const std::optional<at::Tensor>& offs = std::nullopt,
                     const ops::Permutation& permutation = {},
                     const std::optional<at::Tensor>& weights = std::nullopt);
  void refresh() override;
  const std::string& recipe() const override { return options_.recipe; }
  void set_recipe(const std::string& recipe) override;
  void set_weight_cache(bool on) override;
  // Copies the given weights into the parameters. Checks all shapes first, so that an error leaves
  // every parameter as it was.
  void load_weights(const ExpertWeights& weights);

  // Makes backward add dw13 and dw2 to these f32 tensors, which have the shapes of the weights, and
  // leave .grad alone. Undefined tensors turn this off.
  void set_main_grads(const at::Tensor& of_w13, const at::Tensor& of_w2);

  const ExpertsOptions& options() const { return options_; }
  at::Tensor w13, w2;
  at::Tensor b13, b2;  // undefined without bias

 private:
  Stored stored13() const;
  Stored stored2() const { return {.transposed = options_.transposed}; }
  bool has_moved() const;  // to() leaves the caches behind, as they are not buffers

  ExpertsOptions options_;
  std::optional<WeightCache> cache13_, cache2_;
  at::Tensor main_grad13_, main_grad2_;
};
TORCH_MODULE(GroupedExperts);

// The MLP that every token passes: one expert without routing.
class SharedExpertsImpl : public torch::nn::Module {
 public:
  explicit SharedExpertsImpl(ExpertsOptions options);  // ignores num_experts

  at::Tensor forward(const at::Tensor& x) { return experts(x, std::optional<at::Tensor>()); }

  GroupedExperts experts = nullptr;
};
TORCH_MODULE(SharedExperts);

}  // namespace moxie::nn
