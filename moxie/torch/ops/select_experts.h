// From a router's logits to experts and weights (core/select). f64, for gradcheck, is computed with
// torch's own ops.
#pragma once

#include "moxie/core/select/select.h"
#include "moxie/torch/view.h"

namespace moxie::ops {

inline Weighting weighting_of(bool sigmoid, bool normalize, double scale) {
  return {
      .score = sigmoid ? Score::kSigmoid : Score::kSoftmax, .normalize = normalize, .scale = scale};
}

// The weights [T, k] of logits [T, E], composed of differentiable ops.
Tensor composite_weights(const Tensor& logits, const Tensor& ids, const Weighting& how);

}  // namespace moxie::ops
