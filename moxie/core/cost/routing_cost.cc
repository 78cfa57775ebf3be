#include "moxie/core/cost/routing_cost.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#include "moxie/core/base/check.h"

namespace moxie {
namespace {

constexpr const char* kOp = "unique_places";

// Number of scores to draw: 8192 tokens if there are 256 experts. A token's number of places has a
// mean of 4 or more and deviates by about 1, so the mean of 1024 tokens (2048 experts) is within
// 1 % of the truth, and that of 8192 within 0.3 %.
constexpr int64_t kRandomScores = 1 << 21;

// Drawing without replacement: a place is missed if all top_k experts are in other places.
double without_groups(const RoutingOdds& odds, int64_t places) {
  const auto experts = static_cast<double>(odds.experts), count = static_cast<double>(places);
  double missed = 1;
  for (int64_t i = 0; i < odds.top_k; ++i) {
    const auto chosen = static_cast<double>(i);
    missed *= std::max(0., (experts - experts / count - chosen) / (experts - chosen));
  }
  return count * (1 - missed);
}

// The groups that one token may choose experts from: those with the largest sums of two best
// scores.
std::vector<int64_t> kept_groups(const RoutingOdds& odds, const std::vector<double>& scores) {
  const int64_t size = odds.experts / odds.groups;
  std::vector<double> sums;
  for (int64_t group = 0; group < odds.groups; ++group) {
    std::vector<double> of_group(scores.begin() + group * size,
                                 scores.begin() + (group + 1) * size);
    const int64_t best = std::min<int64_t>(2, size);
    std::partial_sort(of_group.begin(), of_group.begin() + best, of_group.end(), std::greater<>());
    sums.push_back(std::accumulate(of_group.begin(), of_group.begin() + best, 0.));
  }
  std::vector<int64_t> order(static_cast<size_t>(odds.groups));
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return sums[a] > sums[b]; });
  order.resize(static_cast<size_t>(odds.kept_groups));
  return order;
}

double with_groups(const RoutingOdds& odds, int64_t places) {
  std::mt19937_64 random(1);
  const int64_t size = odds.experts / odds.groups, place_size = odds.experts / places;
  std::vector<double> scores(static_cast<size_t>(odds.experts));
  std::vector<char> is_place(static_cast<size_t>(places));
  const int64_t tokens = std::max<int64_t>(1, kRandomScores / odds.experts);
  int64_t found = 0;
  for (int64_t token = 0; token < tokens; ++token) {
    for (double& score : scores) score = static_cast<double>(random() >> 11) * 0x1p-53;
    std::vector<int64_t> experts;
    for (const int64_t group : kept_groups(odds, scores))
      for (int64_t i = 0; i < size; ++i) experts.push_back(group * size + i);
    std::partial_sort(experts.begin(), experts.begin() + odds.top_k, experts.end(),
                      [&](int64_t a, int64_t b) { return scores[a] > scores[b]; });
    std::fill(is_place.begin(), is_place.end(), 0);
    for (int64_t i = 0; i < odds.top_k; ++i) is_place[experts[i] / place_size] = 1;
    found += std::count(is_place.begin(), is_place.end(), 1);
  }
  return static_cast<double>(found) / static_cast<double>(tokens);
}

}  // namespace

double unique_places(const RoutingOdds& odds, int64_t places) {
  const auto& [experts, top_k, groups, kept] = odds;
  MOXIE_CHECK(top_k >= 1 && top_k <= experts, kOp, ": top_k must be from 1 to the ", experts,
              " experts, got ", top_k);
  MOXIE_CHECK(groups >= 1 && experts % groups == 0, kOp, ": groups must divide the ", experts,
              " experts, got ", groups);
  MOXIE_CHECK(kept >= 1 && kept <= groups, kOp, ": kept_groups must be from 1 to ", groups,
              ", got ", kept);
  MOXIE_CHECK(top_k <= kept * (experts / groups), kOp, ": the kept groups must hold top_k ", top_k,
              " experts, got ", kept * (experts / groups));
  MOXIE_CHECK(places >= 1 && experts % places == 0, kOp, ": places must divide the ", experts,
              " experts, got ", places);
  return kept == groups ? without_groups(odds, places) : with_groups(odds, places);
}

}  // namespace moxie
