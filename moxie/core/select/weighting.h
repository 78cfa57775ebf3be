// The arithmetic of one token in f64: scores to weights, and gradients of weights to gradients of
// logits. All backends share it; each computes its own exponentials.
#pragma once

#include <limits>

#include "moxie/core/select/select.h"

namespace moxie {

// The sigmoid of a logit and its derivative, from z = exp(-|logit|), which never overflows.
constexpr double sigmoid(float logit, double z) { return (logit < 0 ? z : 1) / (1 + z); }
constexpr double sigmoid_slope(double z) { return z / ((1 + z) * (1 + z)); }

// The smallest divisor of scores: sigmoids can all be 0, and a bias can choose experts whose
// softmax is 0.
inline constexpr double kLeastTotal = std::numeric_limits<float>::min();

// The weight of a chosen expert. `total` is the sum of the scores of all experts that were chosen
// for the token. NaN stays NaN.
constexpr float weight_of(double score, double total, const Weighting& how) {
  if (how.normalize) score /= total < kLeastTotal ? kLeastTotal : total;
  return static_cast<float>(score * how.scale);
}

// Sums of score and of dweight * score over a token's slots.
struct SlotSums {
  double total = 0, dot = 0;
};

// The gradient of a chosen expert's score.
constexpr double dscore_of(double dweight, const SlotSums& sums, const Weighting& how) {
  if (!how.normalize) return how.scale * dweight;
  if (sums.total < kLeastTotal) return how.scale * dweight / kLeastTotal;
  return how.scale * (dweight - sums.dot / sums.total) / sums.total;
}

// The sum of dscore * score over the slots, which the softmax gradient subtracts from every dscore.
// It is 0 if the weights are normalized, as they then add up to a constant.
constexpr double softmax_shift(const SlotSums& sums, const Weighting& how) {
  if (!how.normalize) return how.scale * sums.dot;
  if (sums.total < kLeastTotal) return how.scale * sums.dot / kLeastTotal;
  return 0;
}

// The gradient of a logit through a softmax; dscore is 0 for an expert that is not chosen.
constexpr float softmax_dlogit(double score, double dscore, double shift) {
  return static_cast<float>(score * (dscore - shift));
}

}  // namespace moxie
