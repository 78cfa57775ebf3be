// AdamW over float32 master weights; the model's own weights are their rounding to its dtype.
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

  // Adds the gradients of a micro-batch, and takes them away from the model.
  void accumulate();
  at::Tensor grad_norm() const;  // f32 [], of everything accumulated
  // norm is grad_norm()'s value. Afterwards nothing is accumulated.
  void step(int64_t step, double norm);
  void drop_gradients();

  // Sets the model's weights from the masters.
  void write_weights();
  const std::vector<Weight>& weights() const { return weights_; }

 private:
  const Config config_;
  std::vector<Weight> weights_;
  at::Tensor step_, scale_;  // f32 []
};

// Of step 0, 1, ..: linear to config.lr, then a cosine down to config.min_lr of it.
double learning_rate(const Config& config, int64_t step);

}  // namespace moxie::cli
