#include "moxie/core/cost/exchange_cost.h"

#include <algorithm>
#include <cmath>

#include "moxie/core/base/check.h"
#include "moxie/core/cost/cost.h"

namespace moxie {
namespace {

constexpr const char* kOp = "exchange_cost";
constexpr int64_t kBf16Bytes = 2;

int64_t domains_of(const Cluster& cluster) { return cluster.ranks / cluster.domain; }

// Limits a domain to the ranks of the group, because it may be larger than the group.
Cluster within_group(Cluster cluster) {
  cluster.domain = std::min(cluster.domain, cluster.ranks);
  return cluster;
}

void check(const ExchangeCostArgs& args, const Cluster& cluster) {
  MOXIE_CHECK(cluster.ranks >= 1, kOp, ": ranks must be positive, got ", cluster.ranks);
  MOXIE_CHECK(cluster.domain >= 1, kOp, ": domain must be positive, got ", cluster.domain);
  MOXIE_CHECK(cluster.ranks % cluster.domain == 0, kOp, ": domain must divide the ", cluster.ranks,
              " ranks, got ", cluster.domain);
  MOXIE_CHECK(args.odds.experts % cluster.ranks == 0, kOp, ": ranks must divide the ",
              args.odds.experts, " experts, got ", cluster.ranks);
  MOXIE_CHECK(cluster.nvlink > 0 && cluster.nic > 0, kOp, ": link speeds must be positive, got ",
              cluster.nvlink, " and ", cluster.nic);
  for (const int64_t size : {args.tokens, args.dim, args.hidden, args.block})
    MOXIE_CHECK(size >= 1, kOp, ": tokens, dim, hidden and block must be positive, got ", size);
  MOXIE_CHECK(args.imbalance >= 1, kOp, ": imbalance must be at least 1, got ", args.imbalance);
  MOXIE_CHECK(args.flops_per_second > 0, kOp, ": flops_per_second must be positive, got ",
              args.flops_per_second);
}

// FLOPs of forward, dgrad and wgrad with w13 [2F, D] and w2 [D, F], for the rows of one rank.
double products_flops(const ExchangeCostArgs& args) {
  const int64_t rows = args.tokens * args.odds.top_k;
  return 3 * (grouped_mm_flops(rows, 2 * args.hidden, args.dim) +
              grouped_mm_flops(rows, args.dim, args.hidden));
}

bool is_dispatch(Leg leg) { return leg == Leg::kDispatchX || leg == Leg::kDispatchDy; }

}  // namespace

LegBytes leg_bytes(const Cluster& given, Path path, double to_ranks, double to_domains) {
  const Cluster cluster = within_group(given);
  const auto ranks = static_cast<double>(cluster.ranks);
  const auto domain = static_cast<double>(cluster.domain);
  if (path == Path::kDirect)
    return {.all = to_ranks,
            .nvlink = to_ranks * (domain - 1) / ranks,
            .nic = to_ranks * (ranks - domain) / ranks};
  // A row arrives at one of the domain's ranks, which sends it to the others by NVLink.
  return {.all = to_ranks,
          .nvlink = to_ranks * (domain - 1) / domain,
          .nic = to_domains * (ranks - domain) / ranks};
}

double leg_seconds(const Cluster& given, Path path, const LegBytes& bytes, const LinkFit& fit) {
  const Cluster cluster = within_group(given);
  const int64_t peers =
      path == Path::kDirect ? cluster.ranks - 1 : cluster.domain - 1 + domains_of(cluster) - 1;
  if (peers == 0) return 0;
  return std::max(bytes.nvlink / (cluster.nvlink * fit.nvlink_share),
                  bytes.nic / (cluster.nic * fit.nic_share)) +
         fit.seconds + fit.seconds_per_peer * static_cast<double>(peers);
}

double ExchangeCost::bytes() const {
  double sum = 0;
  for (const LegCost& leg : legs) sum += leg.bytes.all;
  return sum;
}

double ExchangeCost::seconds() const {
  double sum = 0;
  for (const LegCost& leg : legs) sum += leg.seconds;
  return sum;
}

double ExchangeCost::exposed() const { return seconds() / (seconds() + products_seconds); }

double ExchangeCost::exposed_overlapped() const {
  return std::max(0., seconds() - products_seconds) / std::max(seconds(), products_seconds);
}

ExchangeCost exchange_cost(const ExchangeCostArgs& args) {
  const Cluster cluster = within_group(args.cluster);
  check(args, cluster);
  const WireRows wire = args.wire == WireFormat::kFp8 ? fp8_wire(args.dim, args.block, kBf16Bytes)
                                                      : unquantized_wire(args.dim, kBf16Bytes);
  ExchangeCost cost{
      .ranks_per_token = unique_places(args.odds, cluster.ranks),
      .legs = {},
      .products_seconds = products_flops(args) * args.imbalance / args.flops_per_second};
  const int64_t pairs = args.tokens * args.odds.top_k;
  const auto rows_of = [&](double places_per_token) {
    return std::llround(static_cast<double>(args.tokens) * places_per_token);
  };
  const int64_t to_ranks = args.once_per_rank ? rows_of(cost.ranks_per_token) : pairs;
  const int64_t to_domains =
      args.path == Path::kForwarded ? rows_of(unique_places(args.odds, domains_of(cluster))) : 0;
  for (const Leg leg : {Leg::kDispatchX, Leg::kCombineY, Leg::kDispatchDy, Leg::kCombineDx}) {
    const Path path = is_dispatch(leg) ? args.path : Path::kDirect;
    const auto bytes = [&](int64_t tokens) {
      return static_cast<double>(message_bytes(wire, leg, tokens, pairs));
    };
    LegCost& one = cost.legs[static_cast<size_t>(leg)];
    one.rows = is_dispatch(leg) ? to_ranks : pairs;
    one.bytes = leg_bytes(cluster, path, bytes(to_ranks), bytes(to_domains));
    const LegBytes fullest{.all = one.bytes.all * args.imbalance,
                           .nvlink = one.bytes.nvlink * args.imbalance,
                           .nic = one.bytes.nic * args.imbalance};
    one.seconds = leg_seconds(cluster, path, fullest, args.fit);
  }
  return cost;
}

}  // namespace moxie
