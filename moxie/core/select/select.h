// select: from a router's logits to the k experts of each token, their weights, and the number of
// tokens of each expert.
//
// The score of an expert is the softmax over the token's logits, or the sigmoid of its own logit.
// Experts are chosen by score + bias in the order of top_k (route.h); weights depend on the score
// alone. Scores are computed in f64 and rounded to f32, so that a token's experts do not depend on
// its position or the backend; weights and gradients are computed from them in f64 and rounded
// once.
#pragma once

#include <optional>

#include "moxie/core/base/exec.h"
#include "moxie/core/base/view.h"
#include "moxie/core/route/route.h"

namespace moxie {

enum class Score : uint8_t { kSoftmax, kSigmoid };

constexpr const char* name(Score score) { return score == Score::kSoftmax ? "softmax" : "sigmoid"; }

// How the scores of a token's k experts become weights.
struct Weighting {
  Score score = Score::kSoftmax;
  bool normalize = true;  // divide by their sum, or by the smallest normal f32 if that is larger
  double scale = 1;       // then multiply
};

// What happens to counts.
enum class Counts : uint8_t { kOverwritten, kAddedTo, kNotWanted };

struct SelectArgs {
  View<const float> logits;               // [T, E], E at most kMaxGroups
  std::optional<View<const float>> bias;  // [E]
  Weighting weighting;
  View<int32_t> ids;     // result, [T, k], k <= E and at most kMaxTopK
  View<float> weights;   // result, [T, k]
  View<int64_t> counts;  // result, [E]: how often an expert is among ids; any, if not wanted
  Counts how_counts = Counts::kOverwritten;
};
void select(const SelectArgs& args, const Exec& exec);

// The gradient of weights with respect to logits; ids are not differentiable.
struct SelectBackwardArgs {
  View<const float> dweights;  // [T, k]
  View<const float> logits;    // [T, E]
  View<const int32_t> ids;     // [T, k], as select returned them; clamped to [0, E) on a GPU
  Weighting weighting;
  View<float> dlogits;  // result, [T, E]
};
void select_backward(const SelectBackwardArgs& args, const Exec& exec);

}  // namespace moxie
