// What a router makes of its logits (core/select). In f64, which tests take derivatives of, torch's
// own ops compute it.
#pragma once

#include "moxie/core/select/select.h"
#include "moxie/torch/view.h"

namespace moxie::ops {

inline Weighting weighting_of(bool sigmoid, bool normalize, double scale) {
  return {
      .score = sigmoid ? Score::kSigmoid : Score::kSoftmax, .normalize = normalize, .scale = scale};
}

// [T, k] of logits [T, E], made of differentiable ops.
Tensor composite_weights(const Tensor& logits, const Tensor& ids, const Weighting& how);

}  // namespace moxie::ops
