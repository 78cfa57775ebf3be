// AdamW on float32 master weights. The model's own weights are the masters, rounded to the model's
// dtype.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "moxie/cli/train/config.h"
#include "moxie/cli/train/model.h"

namespace moxie::cli {

struct Weight {
  std::string name;
  at::Tensor parameter;     // the model's
  at::Tensor master;        // f32
  at::Tensor grad;          // f32, summed over micro-batches
  at::Tensor mean, square;  // f32, AdamW's moments
};

class AdamW {
 public:
  AdamW(LanguageModelImpl& model, const Config& config);

  // Adds the gradients of a micro-batch, and clears them in the model.
  void accumulate();
  at::Tensor grad_norm() const;  // f32 []: the norm of the accumulated gradients
  // Takes a step with the accumulated gradients, then clears them. norm: the value of grad_norm().
  void step(int64_t step, double norm);
  void drop_gradients();

  // Sets the model's weights to the rounded masters.
  void write_weights();
  const std::vector<Weight>& weights() const { return weights_; }

 private:
  const Config config_;
  std::vector<Weight> weights_;
  at::Tensor step_, scale_;  // f32 []
};

// The learning rate of a step (the first is 0): a linear warm-up to config.lr, then a cosine down
// to config.min_lr * config.lr.
double learning_rate(const Config& config, int64_t step);

}  // namespace moxie::cli
