// Compares select on every backend of this machine with ref: ids and counts must be equal; weights
// and gradients equal or adjacent f32 values, because backends compute the exponential differently.
#include "moxie/core/select/select.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <sstream>

#include "moxie/core/base/check.h"
#include "moxie/core/route/rank.h"
#include "tests/support/arena.h"
#include "tests/support/backends.h"
#include "tests/support/random.h"
#include "tests/support/two_threads.h"

namespace moxie::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
const Exec kRef{.backend = Backend::kRef};

struct Problem {
  int64_t tokens, experts, k;
  Weighting weighting;
  std::vector<float> logits, bias, dweights;

  Problem(Random& random, int64_t t, int64_t e, int64_t chosen) : tokens(t), experts(e), k(chosen) {
    weighting = {.score = random.pick({Score::kSoftmax, Score::kSigmoid}),
                 .normalize = random.chance(60),
                 .scale = random.pick({1.0, 2.5})};
    logits = random_values<float>(random, tokens * experts, Data::kGaussianLike);
    if (random.chance(30))  // many are equal
      for (float& value : logits) value = std::round(value);
    if (random.chance(50)) bias = random_values<float>(random, experts, Data::kGaussianLike);
    dweights = random_values<float>(random, tokens * k, Data::kGaussianLike);
  }
  std::string text() const {
    std::ostringstream out;
    out << name(weighting.score) << " [" << tokens << ", " << experts << "] k " << k
        << (weighting.normalize ? " normalized" : "") << (bias.empty() ? "" : " bias");
    return out.str();
  }
};

struct Selected {
  std::vector<int32_t> ids;
  std::vector<float> weights, dlogits;
  std::vector<int64_t> counts;
};

template <class T>
std::vector<T> as(const std::vector<uint8_t>& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

Selected run(const Problem& p, const Exec& exec) {
  Arena arena(exec.backend);
  const auto logits = arena.input(p.logits, {p.tokens, p.experts});
  std::optional<View<const float>> bias;
  if (!p.bias.empty()) bias = arena.input(p.bias, {p.experts});
  const auto ids = arena.output<int32_t>({p.tokens, p.k});
  select({.logits = logits,
          .bias = bias,
          .weighting = p.weighting,
          .ids = ids,
          .weights = arena.output<float>({p.tokens, p.k}),
          .counts = arena.output<int64_t>({p.experts})},
         exec);
  select_backward({.dweights = arena.input(p.dweights, {p.tokens, p.k}),
                   .logits = logits,
                   .ids = {ids.data, ids.shape},
                   .weighting = p.weighting,
                   .dlogits = arena.output<float>({p.tokens, p.experts})},
                  exec);
  const auto out = arena.results();
  return {.ids = as<int32_t>(out[0]),
          .weights = as<float>(out[1]),
          .dlogits = as<float>(out[3]),
          .counts = as<int64_t>(out[2])};
}

// Allows adjacent f32 values, because backends may round an f64 result to f32 differently; and
// 2^-45 beside zero, where gradients cancel, which is far more than errors in f64.
void expect_next_to(const std::vector<float>& actual, const std::vector<float>& expected,
                    const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (size_t i = 0; i < actual.size(); ++i) {
    if (std::isnan(expected[i]) && std::isnan(actual[i])) continue;
    ASSERT_LE(std::abs(actual[i] - expected[i]),
              std::ldexp(std::abs(expected[i]), -23) + std::ldexp(1.f, -45))
        << what << " element " << i;
  }
}

TEST(Select, IsTheReferenceOnEveryBackend) {
  Random random(1);
  TwoThreads pool;
  for (int i = 0; i < 400; ++i) {
    const auto experts = random.pick<int64_t>({1, 2, 7, 16, 31, 32, 33, 64, 100, 128, 256, 1000});
    const int64_t k = random.between(1, min<int64_t>(experts, i % 10 == 0 ? kMaxTopK : 8));
    const Problem problem(random, random.between(0, experts > 200 ? 20 : 150), experts, k);
    const Selected expected = run(problem, kRef);
    for (auto& backend : backends_here()) {
      if (i % 3 == 0) backend.exec.parallel = &pool;
      const Selected actual = run(problem, backend.exec);
      const std::string what = backend.name + ", " + problem.text();
      ASSERT_EQ(actual.ids, expected.ids) << what;
      ASSERT_EQ(actual.counts, expected.counts) << what;
      expect_next_to(actual.weights, expected.weights, what + ": weights");
      expect_next_to(actual.dlogits, expected.dlogits, what + ": dlogits");
    }
  }
}

TEST(Select, CountsAreOverwrittenAddedToOrLeftAlone) {
  Random random(2);
  Problem problem(random, 100, 40, 3);
  problem.bias.clear();
  for (const auto& backend : backends_here()) {
    const auto counts_of = [&](const std::vector<Counts>& calls) {
      Arena arena(backend.exec.backend);
      const auto logits = arena.input(problem.logits, {problem.tokens, problem.experts});
      const auto counts = arena.output<int64_t>({problem.experts});
      for (const Counts how : calls)
        select({.logits = logits,
                .bias = std::nullopt,
                .weighting = problem.weighting,
                .ids = arena.output<int32_t>({problem.tokens, problem.k}),
                .weights = arena.output<float>({problem.tokens, problem.k}),
                .counts = how == Counts::kNotWanted ? View<int64_t>{} : counts,
                .how_counts = how},
               backend.exec);
      return as<int64_t>(arena.results()[0]);
    };
    const auto once = counts_of({Counts::kOverwritten});
    auto thrice = once;
    for (int64_t& count : thrice) count *= 3;
    EXPECT_EQ(counts_of({Counts::kAddedTo, Counts::kOverwritten}), once) << backend.name;
    EXPECT_EQ(
        counts_of({Counts::kOverwritten, Counts::kAddedTo, Counts::kNotWanted, Counts::kAddedTo}),
        thrice)
        << backend.name;
  }
}

// One token with these logits.
Selected select_one(const Exec& exec, std::vector<float> logits, int64_t k,
                    const Weighting& weighting, std::vector<float> bias = {}) {
  Random random(0);
  Problem problem(random, 1, static_cast<int64_t>(logits.size()), k);
  problem.logits = std::move(logits), problem.bias = std::move(bias);
  problem.weighting = weighting;
  return run(problem, exec);
}

std::vector<NamedExec> all_backends() {
  std::vector<NamedExec> all = backends_here();
  all.push_back({"ref", kRef});
  return all;
}

TEST(Select, TakesEqualScoresByIdAndNanLast) {
  const Weighting sigmoid{.score = Score::kSigmoid};
  for (const auto& [name, exec] : all_backends()) {
    EXPECT_EQ(select_one(exec, {1, 2, 1, 2, 0}, 4, sigmoid).ids, (std::vector<int32_t>{1, 3, 0, 2}))
        << name;
    EXPECT_EQ(select_one(exec, {kNan, -kInfinity, kNan, 3}, 4, sigmoid).ids,
              (std::vector<int32_t>{3, 1, 0, 2}))
        << name;
    const Selected of_nan = select_one(exec, {1, kNan, 2}, 2, {});
    EXPECT_EQ(of_nan.ids, (std::vector<int32_t>{0, 1})) << name << ": a softmax with NaN is NaN";
    EXPECT_TRUE(std::isnan(of_nan.weights[0]) && std::isnan(of_nan.dlogits[2])) << name;
  }
}

TEST(Select, ChoosesByTheBiasAndWeighsWithoutIt) {
  for (const auto& [name, exec] : all_backends()) {
    const Selected one = select_one(exec, {0, 0, 0, 0}, 2, {.scale = 4}, {0, 0.5, 0, 1});
    EXPECT_EQ(one.ids, (std::vector<int32_t>{3, 1})) << name;
    EXPECT_EQ(one.weights, (std::vector<float>{2, 2})) << name;
    EXPECT_EQ(one.counts, (std::vector<int64_t>{0, 1, 0, 1})) << name;
  }
}

TEST(Select, ScoresThatAreAllZeroHaveFiniteWeightsAndGradients) {
  for (const auto& [name, exec] : all_backends()) {
    const Weighting sigmoid{.score = Score::kSigmoid};
    for (const Weighting& how : {sigmoid, Weighting{}}) {
      const Selected one = select_one(exec, {-2000, -2000, 0}, 2, how, {1, 1, -1});
      EXPECT_EQ(one.ids, (std::vector<int32_t>{0, 1})) << name;
      EXPECT_EQ(one.weights, (std::vector<float>{0, 0})) << name;
      for (const float value : one.dlogits) EXPECT_EQ(value, 0) << name;
    }
  }
}

TEST(Select, KeysOfRanksHaveTheOrderOfTopK) {
  const float values[] = {-kInfinity, -1, -1e-45f, -0.f, 0.f, 1e-45f, 0.5f, 1, kInfinity, kNan};
  for (const float a : values)
    for (const float b : values) {
      EXPECT_EQ(rank_key(a) > rank_key(b), ranks_before(a, 1, b, 0)) << a << ' ' << b;
      EXPECT_EQ(rank_key(a) >= rank_key(b), ranks_before(a, 0, b, 1)) << a << ' ' << b;
      EXPECT_GT(rank_key(a), 0u);
    }
}

TEST(Select, ABadCallSaysTheOpTheRuleAndTheValue) {
  std::vector<float> logits(2048), weights(2048), none;
  std::vector<int32_t> ids(2048, 7);
  std::vector<int64_t> counts(2048);
  const auto message_of = [&](int64_t experts, int64_t k, int64_t num_counts) -> std::string {
    try {
      select({.logits = {logits.data(), {1, experts}},
              .bias = std::nullopt,
              .weighting = {},
              .ids = {ids.data(), {1, k}},
              .weights = {weights.data(), {1, k}},
              .counts = {counts.data(), {num_counts}}},
             kRef);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message_of(2048, 1, 2048), "select_experts: there must be 1 to 1024 experts, got 2048");
  EXPECT_EQ(message_of(4, 5, 4),
            "select_experts: k must be 1 to the 4 experts and at most 64, got 5");
  EXPECT_EQ(message_of(4, 2, 3), "select_experts: counts must be [4], got [3]");
  EXPECT_THROW(select_backward({.dweights = {weights.data(), {1, 1}},
                                .logits = {logits.data(), {1, 4}},
                                .ids = {ids.data(), {1, 1}},
                                .weighting = {},
                                .dlogits = {weights.data(), {1, 4}}},
                               kRef),
               Error);
}

}  // namespace
}  // namespace moxie::testing
