// Chooses experts and their weights from a router's logits (core/select). f64, for gradcheck, is
// computed with torch's own ops.
#pragma once

#include "moxie/core/select/select.h"
#include "moxie/torch/view.h"

namespace moxie::ops {

inline Weighting weighting_of(bool sigmoid, bool normalize, double scale) {
  return {
      .score = sigmoid ? Score::kSigmoid : Score::kSoftmax, .normalize = normalize, .scale = scale};
}

// The weights [T, k] of the experts `ids`, from logits [T, E], computed with torch's own
// differentiable ops.
Tensor composite_weights(const Tensor& logits, const Tensor& ids, const Weighting& how);

}  // namespace moxie::ops
