#include "moxie/core/cost/exchange_cost.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "moxie/core/base/check.h"
#include "moxie/core/cost/published_legs.h"

namespace moxie {
namespace {

ExchangeCostArgs deepseek(int64_t ranks) {
  ExchangeCostArgs args;
  args.cluster.ranks = ranks;
  args.flops_per_second = 1e15;
  return args;
}

const LegCost& leg_of(const ExchangeCost& cost, Leg leg) {
  return cost.legs[static_cast<size_t>(leg)];
}

TEST(UniquePlaces, WithoutGroupsCountsWhatEveryChoiceOfExpertsGives) {
  // Two of 6 experts can be chosen in 15 ways. On 3 ranks (2 experts each) 3 of these ways choose
  // experts of one rank; on 2 ranks (3 experts each) 6 do.
  const RoutingOdds odds{.experts = 6, .top_k = 2};
  EXPECT_DOUBLE_EQ(unique_places(odds, 1), 1);
  EXPECT_DOUBLE_EQ(unique_places(odds, 2), (6 * 1 + 9 * 2) / 15.);
  EXPECT_DOUBLE_EQ(unique_places(odds, 3), (3 * 1 + 12 * 2) / 15.);
  EXPECT_DOUBLE_EQ(unique_places(odds, 6), 2) << "one expert per rank: a rank for each of top_k";
  EXPECT_DOUBLE_EQ(unique_places({.experts = 4, .top_k = 4}, 2), 2) << "all experts, all ranks";
}

TEST(UniquePlaces, WithGroupsNeverExceedsTheKeptOnes) {
  const RoutingOdds odds{.experts = 64, .top_k = 8, .groups = 8, .kept_groups = 2};
  EXPECT_LE(unique_places(odds, 8), 2);
  EXPECT_GT(unique_places(odds, 8), 1.9) << "a group is kept for its best experts";
  EXPECT_LE(unique_places(odds, 64), 8.);
  EXPECT_EQ(unique_places(odds, 16), unique_places(odds, 16)) << "the same tokens every time";
  // With limited groups unique_places() counts over random tokens, without it is exact. If 63 of
  // 64 groups are kept, the limit hardly matters, so both must give almost the same.
  const RoutingOdds most{.experts = 64, .top_k = 8, .groups = 64, .kept_groups = 63};
  const RoutingOdds all{.experts = 64, .top_k = 8, .groups = 64, .kept_groups = 64};
  EXPECT_NEAR(unique_places(most, 8), unique_places(all, 8), 0.05);
}

TEST(UniquePlaces, RefusesOddsThatDoNotExist) {
  EXPECT_THROW(unique_places({.experts = 8, .top_k = 9}, 2), Error);
  EXPECT_THROW(unique_places({.experts = 8, .top_k = 0}, 2), Error);
  EXPECT_THROW(unique_places({.experts = 8, .top_k = 2}, 3), Error);
  EXPECT_THROW(unique_places({.experts = 8, .top_k = 2, .groups = 3}, 2), Error);
  EXPECT_THROW(unique_places({.experts = 8, .top_k = 2, .groups = 4, .kept_groups = 5}, 2), Error);
  EXPECT_THROW(unique_places({.experts = 8, .top_k = 4, .groups = 4, .kept_groups = 1}, 2), Error);
}

TEST(ExchangeCost, BytesAreThoseOfTheWire) {
  ExchangeCostArgs args = deepseek(4);
  const ExchangeCost cost = exchange_cost(args);
  const int64_t pairs = 4096 * 8;
  const auto rows = static_cast<int64_t>(std::llround(4096 * cost.ranks_per_token));
  const WireRows wire = fp8_wire(7168, 128, 2);
  for (const Leg leg : {Leg::kDispatchX, Leg::kCombineY, Leg::kDispatchDy, Leg::kCombineDx})
    EXPECT_EQ(leg_of(cost, leg).bytes.all,
              static_cast<double>(message_bytes(wire, leg, rows, pairs)));
  EXPECT_EQ(leg_of(cost, Leg::kDispatchX).rows, rows);
  EXPECT_EQ(leg_of(cost, Leg::kCombineY).rows, pairs);
}

TEST(ExchangeCost, Fp8RowsAndDeduplicationSaveWhatTheyPromise) {
  // deepseek(4): dim 7168, 256 experts, top 8, 4 ranks. Here with blocks of 32.
  ExchangeCostArgs args = deepseek(4);
  args.block = 32;
  const double once = exchange_cost(args).bytes();
  args.once_per_rank = false;
  const double pairs = exchange_cost(args).bytes();
  args.wire = WireFormat::kBf16;
  const double bf16 = exchange_cost(args).bytes();
  EXPECT_LE(pairs / bf16, 0.76);
  EXPECT_LE(once / bf16, 0.62);
}

TEST(ExchangeCost, BytesLeaveByTheLinkBetweenTheirRanks) {
  const Cluster cluster{.ranks = 16, .domain = 8};
  const LegBytes direct = leg_bytes(cluster, Path::kDirect, 1600, 0);
  EXPECT_EQ(direct.all, 1600);
  EXPECT_EQ(direct.nvlink, 700) << "7 of 16 ranks";
  EXPECT_EQ(direct.nic, 800) << "8 of 16 ranks";
  const LegBytes forwarded = leg_bytes(cluster, Path::kForwarded, 1600, 400);
  EXPECT_EQ(forwarded.nvlink, 1400) << "all but the rows that arrive at their rank";
  EXPECT_EQ(forwarded.nic, 200) << "one of two domains";
  const LegBytes inside = leg_bytes({.ranks = 4, .domain = 8}, Path::kDirect, 1600, 0);
  EXPECT_EQ(inside.nvlink, 1200) << "a domain larger than the group joins all ranks";
  EXPECT_EQ(inside.nic, 0);
  EXPECT_EQ(leg_bytes({.ranks = 1}, Path::kDirect, 1600, 0).nvlink, 0);
}

TEST(ExchangeCost, TheSlowerLinkDecides) {
  const Cluster cluster{.ranks = 16, .domain = 8, .nvlink = 100, .nic = 10};
  const LinkFit fit{.nvlink_share = 0.5, .nic_share = 1, .seconds = 3, .seconds_per_peer = 0.5};
  EXPECT_DOUBLE_EQ(leg_seconds(cluster, Path::kDirect, {.all = 0, .nvlink = 100, .nic = 10}, fit),
                   2 + 3 + 15 * 0.5);
  EXPECT_DOUBLE_EQ(
      leg_seconds(cluster, Path::kForwarded, {.all = 0, .nvlink = 100, .nic = 50}, fit),
      5 + 3 + (7 + 1) * 0.5);
  EXPECT_EQ(leg_seconds({.ranks = 1}, Path::kDirect, {}), 0) << "nothing is sent";
}

TEST(ExchangeCost, ImbalanceStretchesLegsAndProducts) {
  ExchangeCostArgs args = deepseek(16);
  args.fit.seconds = 0;
  const ExchangeCost even = exchange_cost(args);
  args.imbalance = 1.5;
  const ExchangeCost uneven = exchange_cost(args);
  EXPECT_DOUBLE_EQ(uneven.seconds(), 1.5 * even.seconds());
  EXPECT_DOUBLE_EQ(uneven.products_seconds, 1.5 * even.products_seconds);
  EXPECT_EQ(uneven.bytes(), even.bytes()) << "the mean rank sends the same";
}

TEST(ExchangeCost, ExposedIsWhatProductsDoNotHide) {
  ExchangeCost cost;
  cost.products_seconds = 6;
  for (LegCost& leg : cost.legs) leg.seconds = 0.5;
  EXPECT_DOUBLE_EQ(cost.exposed(), 2. / 8);
  EXPECT_DOUBLE_EQ(cost.exposed_overlapped(), 0);
  for (LegCost& leg : cost.legs) leg.seconds = 2;
  EXPECT_DOUBLE_EQ(cost.exposed(), 8. / 14);
  EXPECT_DOUBLE_EQ(cost.exposed_overlapped(), 2. / 8);
}

TEST(ExchangeCost, ForwardingCrossesTheNicOncePerDomain) {
  ExchangeCostArgs args = deepseek(64);
  const LegCost direct = leg_of(exchange_cost(args), Leg::kDispatchDy);
  args.path = Path::kForwarded;
  const ExchangeCost cost = exchange_cost(args);
  const LegCost forwarded = leg_of(cost, Leg::kDispatchDy);
  EXPECT_EQ(forwarded.bytes.all, direct.bytes.all);
  EXPECT_NEAR(forwarded.bytes.nic / direct.bytes.nic,
              unique_places(args.odds, 8) / unique_places(args.odds, 64), 1e-4);
  args.path = Path::kDirect;
  EXPECT_EQ(leg_of(cost, Leg::kCombineY).bytes.nic,
            leg_of(exchange_cost(args), Leg::kCombineY).bytes.nic);
}

TEST(ExchangeCost, RefusesGroupsThatDoNotFit) {
  const auto refused = [](auto change) {
    ExchangeCostArgs args = deepseek(16);
    change(args);
    EXPECT_THROW(exchange_cost(args), Error);
  };
  refused([](ExchangeCostArgs& args) { args.cluster.ranks = 0; });
  refused([](ExchangeCostArgs& args) { args.cluster.domain = 6; });
  refused([](ExchangeCostArgs& args) { args.odds.experts = 24; });
  refused([](ExchangeCostArgs& args) { args.tokens = 0; });
  refused([](ExchangeCostArgs& args) { args.imbalance = 0.9; });
  refused([](ExchangeCostArgs& args) { args.flops_per_second = 0; });
  refused([](ExchangeCostArgs& args) { args.cluster.nic = 0; });
}

// ---- against what others published --------------------------------------------------------------

TEST(Published, SharesOfRowsAreThoseOfTheirRouters) {
  // {ranks, share with all groups allowed, share with 4 of 8 groups}. The share is the number of
  // ranks that a token goes to over top_k = 8, published for 256 experts.
  const RoutingOdds uniform, limited{.groups = 8, .kept_groups = 4};
  const std::vector<std::array<double, 3>> counted = {{4, 0.45, 0.39},  {8, 0.66, 0.49},
                                                      {16, 0.82, 0.72}, {32, 0.91, 0.86},
                                                      {64, 0.96, 0.94}, {256, 1.00, 1.00}};
  for (const auto& [ranks, all_groups, four_groups] : counted) {
    EXPECT_NEAR(unique_places(uniform, static_cast<int64_t>(ranks)) / 8, all_groups, 0.01);
    EXPECT_NEAR(unique_places(limited, static_cast<int64_t>(ranks)) / 8, four_groups, 0.01);
  }
}

TEST(Published, BytesOfALogAreWithinOnePercent) {
  const PublishedBytes published = published_bytes();
  EXPECT_EQ(published.row_bytes, 7488);
  for (const int64_t logged : published.logged) {
    EXPECT_EQ(logged % 7488, 0) << "whole rows";
    EXPECT_NEAR(modelled_bytes(published) / static_cast<double>(logged), 1, 0.01);
  }
}

// Relative errors of the model on the published times that the fit did not use, in rising order.
std::vector<double> errors(Half fitted) {
  const LinkFit fit = fit_links(fitted);
  std::vector<double> found;
  for (size_t i = 0; i < published_legs().size(); ++i) {
    const PublishedLeg& leg = published_legs()[i];
    if (is_held_back(i) == (fitted == Half::kFitted))
      found.push_back(std::abs(modelled_seconds(leg, fit) / published_seconds(leg) - 1));
  }
  std::sort(found.begin(), found.end());
  return found;
}

TEST(Published, HeldBackTimesAreMetWhicheverHalfIsFitted) {
  for (const Half half : {Half::kFitted, Half::kHeldBack}) {
    const std::vector<double> off = errors(half);
    ASSERT_GE(off.size(), 20u);
    EXPECT_LE(off[off.size() / 2], 0.15);
    EXPECT_LE(off.back(), 0.35);
  }
}

TEST(Published, TheDefaultsAreTheFit) {
  const LinkFit fitted = fit_links(), used;
  EXPECT_NEAR(used.nvlink_share, fitted.nvlink_share, 0.005);
  EXPECT_NEAR(used.nic_share, fitted.nic_share, 0.005);
  EXPECT_NEAR(used.seconds, fitted.seconds, 0.5e-6);
  EXPECT_NEAR(used.seconds_per_peer, fitted.seconds_per_peer, 0.005e-6);
}

TEST(Published, BothHalvesHaveEveryKindOfLeg) {
  for (const bool held_back : {false, true})
    for (const Leg leg : {Leg::kDispatchX, Leg::kCombineY})
      for (const Path path : {Path::kDirect, Path::kForwarded}) {
        size_t count = 0;
        for (size_t i = 0; i < published_legs().size(); ++i) {
          const PublishedLeg& one = published_legs()[i];
          count += is_held_back(i) == held_back && one.leg == leg && one.series->path == path;
        }
        EXPECT_GE(count, 3u);
      }
}

}  // namespace
}  // namespace moxie
