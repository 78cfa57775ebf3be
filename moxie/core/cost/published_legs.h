// Times of legs that others published, with their sources, and the fit of the cost model to them.
// Every second entry of the table is held back: the fit does not use it, so it shows the model's
// error.
#pragma once

#include <span>
#include <string_view>

#include "moxie/core/cost/exchange_cost.h"

namespace moxie {

enum class Counted : uint8_t { kRanks, kDomains };  // which rows a published GB/s counts

// One publication: its source, and what all of its times have in common.
struct PublishedSeries {
  std::string_view name, source;
  Cluster cluster;  // Cluster::ranks is not used: see PublishedLeg::ranks
  int64_t tokens = 0;
  Path path = Path::kForwarded;
  bool once_per_rank = true;
  // Either `experts` or `experts_per_rank` is given; the other is 0.
  int64_t experts = 0;  // of the layer
  int64_t experts_per_rank = 0;
  int64_t kept_domains = 0;  // the most domains that a token may go to; 0: no limit
  Counted counted = Counted::kDomains;
};

struct PublishedLeg {
  const PublishedSeries* series = nullptr;
  int64_t ranks = 0;
  Leg leg = Leg::kDispatchX;  // kDispatchX or kCombineY
  double row_bytes = 0;       // of their format
  // The published figure is either `gb_per_s` or `microseconds`; the other is 0.
  double gb_per_s = 0;
  double microseconds = 0;
};

std::span<const PublishedLeg> published_legs();
constexpr bool is_held_back(size_t index) { return index % 2 == 1; }

double published_seconds(const PublishedLeg& leg);
double modelled_seconds(const PublishedLeg& leg, const LinkFit& fit = {});

// Fits the links to one half of the points: least squares of log(modelled / published).
enum class Half : uint8_t { kFitted, kHeldBack };
LinkFit fit_links(Half half = Half::kFitted);

// Bytes that the ranks of one group logged for one leg; all rows have the same format.
struct PublishedBytes {
  const PublishedSeries* series = nullptr;
  int64_t ranks = 0;
  double row_bytes = 0;
  std::span<const int64_t> logged;
};
PublishedBytes published_bytes();
double modelled_bytes(const PublishedBytes& bytes);

}  // namespace moxie
