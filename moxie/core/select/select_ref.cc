// The spec as loops (ref), and the same loops over threads (cpu).
#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>
#include <vector>

#include "moxie/core/base/math.h"
#include "moxie/core/base/parallel.h"
#include "moxie/core/route/rank.h"
#include "moxie/core/select/backends.h"
#include "moxie/core/select/weighting.h"

namespace moxie {
namespace {

struct Softmax {
  double largest, sum;

  Softmax(const float* logits, int64_t experts)
      : largest(-std::numeric_limits<double>::infinity()), sum(0) {
    for (int64_t e = 0; e < experts; ++e)
      if (logits[e] > largest) largest = logits[e];
    for (int64_t e = 0; e < experts; ++e) sum += std::exp(logits[e] - largest);
  }
  double operator()(float logit) const { return std::exp(logit - largest) / sum; }
};

double decay(float logit) { return std::exp(-std::abs(static_cast<double>(logit))); }

// One token's scores of all experts: `ranked` (with the bias) decides which experts the token goes
// to, `scores` (without) gives the weights of these.
struct TokenScores {
  std::vector<float> scores, ranked;

  explicit TokenScores(int64_t experts) : scores(experts), ranked(experts) {}
  void compute(const SelectArgs& args, int64_t token) {
    const auto experts = static_cast<int64_t>(scores.size());
    const float* logits = args.logits.data + token * experts;
    if (args.weighting.score == Score::kSoftmax)
      std::transform(logits, logits + experts, scores.begin(), Softmax(logits, experts));
    else
      std::transform(logits, logits + experts, scores.begin(),
                     [](float x) { return static_cast<float>(sigmoid(x, decay(x))); });
    for (int64_t e = 0; e < experts; ++e)
      ranked[e] = args.bias ? scores[e] + args.bias->data[e] : scores[e];
  }
  void weigh(const SelectArgs& args, int64_t token) const {
    const int64_t k = args.ids.dim(1);
    const int32_t* ids = args.ids.data + token * k;
    double total = 0;
    for (int64_t j = 0; j < k; ++j) total += scores[ids[j]];
    for (int64_t j = 0; j < k; ++j)
      args.weights.data[token * k + j] = weight_of(scores[ids[j]], total, args.weighting);
  }
};

void differentiate(const SelectBackwardArgs& args, int64_t token) {
  const int64_t experts = args.logits.dim(1), k = args.ids.dim(1);
  const Weighting& how = args.weighting;
  const float* logits = args.logits.data + token * experts;
  const float* dweights = args.dweights.data + token * k;
  const int32_t* ids = args.ids.data + token * k;
  float* dlogits = args.dlogits.data + token * experts;
  const bool is_softmax = how.score == Score::kSoftmax;
  const Softmax softmax(logits, is_softmax ? experts : 0);
  const auto score_of = [&](float x) { return is_softmax ? softmax(x) : sigmoid(x, decay(x)); };

  SlotSums sums;
  for (int64_t j = 0; j < k; ++j) {
    const double score = score_of(logits[ids[j]]);
    sums.total += score;
    sums.dot += dweights[j] * score;
  }
  const double shift = softmax_shift(sums, how);
  for (int64_t e = 0; e < experts; ++e)
    dlogits[e] = is_softmax ? softmax_dlogit(softmax(logits[e]), 0, shift) : 0;
  for (int64_t j = 0; j < k; ++j) {
    const float logit = logits[ids[j]];
    const double dscore = dscore_of(dweights[j], sums, how);
    dlogits[ids[j]] = is_softmax ? softmax_dlogit(softmax(logit), dscore, shift)
                                 : static_cast<float>(dscore * sigmoid_slope(decay(logit)));
  }
}

void begin_counts(const SelectArgs& args) {
  if (args.how_counts == Counts::kOverwritten) std::fill_n(args.counts.data, args.logits.dim(1), 0);
}

// Tokens per range of work: about 100 microseconds of exponentials, enough to pay for a thread.
int64_t grain_of(int64_t experts) { return max<int64_t>(8192 / experts, 1); }

}  // namespace

namespace ref {

void select(const SelectArgs& args) {
  const KernelScope scope;
  const int64_t experts = args.logits.dim(1), k = args.ids.dim(1);
  const bool counts = args.how_counts != Counts::kNotWanted;
  begin_counts(args);
  TokenScores token(experts);
  std::vector<int32_t> order(experts);
  for (int64_t t = 0; t < args.logits.dim(0); ++t) {
    token.compute(args, t);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return ranks_before(token.ranked[a], a, token.ranked[b], b);
    });
    std::copy_n(order.begin(), k, args.ids.data + t * k);
    for (int64_t j = 0; counts && j < k; ++j) ++args.counts.data[order[j]];
    token.weigh(args, t);
  }
}

void select_backward(const SelectBackwardArgs& args) {
  const KernelScope scope;
  for (int64_t t = 0; t < args.logits.dim(0); ++t) differentiate(args, t);
}

}  // namespace ref

namespace cpu {

void select(const SelectArgs& args, const Exec& exec) {
  const int64_t experts = args.logits.dim(1), k = args.ids.dim(1);
  begin_counts(args);
  parallel_for(exec, args.logits.dim(0), grain_of(experts), [&](int64_t begin, int64_t end) {
    TokenScores token(experts);
    std::vector<int64_t> counts(experts);
    for (int64_t t = begin; t < end; ++t) {
      int32_t* ids = args.ids.data + t * k;
      token.compute(args, t);
      keep_best(token.ranked.data(), experts, k, ids);
      for (int64_t j = 0; j < k; ++j) ++counts[ids[j]];
      token.weigh(args, t);
    }
    if (args.how_counts == Counts::kNotWanted) return;
    // Threads may add in any order, because integer sums do not depend on it.
    for (int64_t e = 0; e < experts; ++e)
      if (counts[e] != 0) std::atomic_ref(args.counts.data[e]) += counts[e];
  });
}

void select_backward(const SelectBackwardArgs& args, const Exec& exec) {
  parallel_for(exec, args.logits.dim(0), grain_of(args.logits.dim(1)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t t = begin; t < end; ++t) differentiate(args, t);
               });
}

}  // namespace cpu

}  // namespace moxie
