#include "moxie/core/cost/published_legs.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

namespace moxie {
namespace {

// Link speeds of one GPU in one direction, in bytes per second, as vendors state them: NVLink of
// H800, H100 and B200 (GB200 and B300 have B200's), ConnectX-7 with 400 Gb/s, and EFA of p6-b300
// with 800 Gb/s.
constexpr double kH800 = 200e9, kH100 = 450e9, kB200 = 900e9, kCx7 = 50e9, kEfaOfB300 = 100e9;

constexpr PublishedSeries kV1OneNode{
    .name = "DeepEP V1, one node",
    .source =
        "DeepEP, docs/legacy.md, normal kernels: H800, 4096 tokens of 7168, top 8 of 256 "
        "experts. GB/s count rows to ranks, the sender included",
    .cluster = {.domain = 8, .nvlink = kH800, .nic = kCx7},
    .tokens = 4096,
    .experts = 256,
    .counted = Counted::kRanks,
};
constexpr PublishedSeries kV1{
    .name = "DeepEP V1",
    .source =
        "the same table, several nodes: H800 and ConnectX-7, 4096 tokens of 7168, "
        "top 8 of 256 experts in at most 4 nodes. GB/s count rows to nodes, the sender's own "
        "included",
    .cluster = {.domain = 8, .nvlink = kH800, .nic = kCx7},
    .tokens = 4096,
    .experts = 256,
    .kept_domains = 4,
};
constexpr PublishedSeries kLowLatency{
    .name = "DeepEP V1, low latency",
    .source =
        "DeepEP, docs/legacy.md, low-latency kernels: H800 and ConnectX-7, 128 tokens of 7168, "
        "a row for each of 8 experts. Published in microseconds",
    .cluster = {.domain = 8, .nvlink = kH800, .nic = kCx7},
    .tokens = 128,
    .path = Path::kDirect,
    .once_per_rank = false,
    .experts = 256,
};
constexpr PublishedSeries kV2Hopper{
    .name = "DeepEP V2, SM90",
    .source =
        "DeepEP, README.md: SM90 (taken as 450 GB/s of NVLink) and ConnectX-7, 8192 tokens of "
        "7168, top 8 of 256 experts. GB/s count rows to nodes, the sender's own included",
    .cluster = {.domain = 8, .nvlink = kH100, .nic = kCx7},
    .tokens = 8192,
    .experts = 256,
};
constexpr PublishedSeries kV2Blackwell{
    .name = "DeepEP V2, SM100",
    .source = "the same table, SM100 (taken as 900 GB/s of NVLink)",
    .cluster = {.domain = 8, .nvlink = kB200, .nic = kCx7},
    .tokens = 8192,
    .experts = 256,
};
constexpr PublishedSeries kV2BlackwellOneNode{
    .name = "DeepEP V2, SM100, one node",
    .source =
        "the same table, SM100, one node, 64 SMs. GB/s count rows to ranks, the sender included",
    .cluster = {.domain = 8, .nvlink = kB200, .nic = kCx7},
    .tokens = 8192,
    .experts = 256,
    .counted = Counted::kRanks,
};
constexpr PublishedSeries kEfa{
    .name = "DeepEP V2, EFA",
    .source =
        "awslabs/awsome-distributed-ai, pull request 1234: log of 16 ranks on two p6-b300 (taken "
        "as 900 GB/s of NVLink and 800 Gb/s of EFA per GPU), 8192 tokens of 7168, top 8 of 256 "
        "experts. Published in bytes and microseconds, of which the slowest rank's are taken",
    .cluster = {.domain = 8, .nvlink = kB200, .nic = kEfaOfB300},
    .tokens = 8192,
    .experts = 256,
};
constexpr PublishedSeries kHybridHopper{
    .name = "HybridEP, H100",
    .source =
        "DeepEP, branch of HybridEP, docs/README_Hybrid-EP.md: H100, kernel only, 16 SMs, 4096 "
        "tokens of 7168, top 8 of 8 experts per rank; the NIC is not named (taken as "
        "ConnectX-7). GB/s count rows to nodes, the sender's own included",
    .cluster = {.domain = 8, .nvlink = kH100, .nic = kCx7},
    .tokens = 4096,
    .experts_per_rank = 8,
};
constexpr PublishedSeries kHybridGb200{
    .name = "HybridEP, GB200",
    .source =
        "the same page: GB200, one NVLink domain, kernel only, 32 SMs. GB/s count rows to ranks, "
        "the sender included",
    .cluster = {.domain = 72, .nvlink = kB200, .nic = kCx7},
    .tokens = 4096,
    .experts_per_rank = 8,
    .counted = Counted::kRanks,
};

constexpr Leg kDispatch = Leg::kDispatchX, kCombine = Leg::kCombineY;

// Bytes of a row of 7168 elements: kBf16; kFp8, which is e4m3 with a scale in f32 for each 128;
// kFp8Header, kFp8 with a header of 16 bytes; kFp8Pairs, kFp8 with 12 bytes for each of 8 experts.
constexpr double kBf16 = 2 * 7168, kFp8 = 7168 + 56 * 4, kFp8Header = kFp8 + 16,
                 kFp8Pairs = kFp8 + 8 * 12;

// If dispatch comes first at one number of ranks, combine comes first at the next. Every second
// entry is held back from the fit (is_held_back), so both halves then hold dispatches and combines.
constexpr std::array kLegs = {
    PublishedLeg{&kV1OneNode, 8, kDispatch, kFp8, 153},
    PublishedLeg{&kV1OneNode, 8, kCombine, kBf16, 158},
    PublishedLeg{&kV1, 16, kCombine, kBf16, 43},
    PublishedLeg{&kV1, 16, kDispatch, kFp8, 43},
    PublishedLeg{&kV1, 32, kDispatch, kFp8, 58},
    PublishedLeg{&kV1, 32, kCombine, kBf16, 57},
    PublishedLeg{&kV1, 64, kCombine, kBf16, 50},
    PublishedLeg{&kV1, 64, kDispatch, kFp8, 51},
    PublishedLeg{&kLowLatency, 8, kDispatch, kFp8Header, 0, 77},
    PublishedLeg{&kLowLatency, 8, kCombine, kBf16, 0, 114},
    PublishedLeg{&kLowLatency, 16, kCombine, kBf16, 0, 195},
    PublishedLeg{&kLowLatency, 16, kDispatch, kFp8Header, 0, 118},
    PublishedLeg{&kLowLatency, 32, kDispatch, kFp8Header, 0, 155},
    PublishedLeg{&kLowLatency, 32, kCombine, kBf16, 0, 273},
    PublishedLeg{&kLowLatency, 64, kCombine, kBf16, 0, 314},
    PublishedLeg{&kLowLatency, 64, kDispatch, kFp8Header, 0, 173},
    PublishedLeg{&kLowLatency, 128, kDispatch, kFp8Header, 0, 192},
    PublishedLeg{&kLowLatency, 128, kCombine, kBf16, 0, 369},
    PublishedLeg{&kLowLatency, 256, kCombine, kBf16, 0, 360},
    PublishedLeg{&kLowLatency, 256, kDispatch, kFp8Header, 0, 194},
    PublishedLeg{&kV2Hopper, 16, kDispatch, kFp8Pairs, 90},
    PublishedLeg{&kV2Hopper, 16, kCombine, kBf16, 81},
    PublishedLeg{&kV2Hopper, 32, kCombine, kBf16, 61},
    PublishedLeg{&kV2Hopper, 32, kDispatch, kFp8Pairs, 61},
    PublishedLeg{&kV2Blackwell, 16, kDispatch, kFp8Pairs, 90},
    PublishedLeg{&kV2Blackwell, 16, kCombine, kBf16, 91},
    PublishedLeg{&kV2BlackwellOneNode, 8, kCombine, kBf16, 740},
    PublishedLeg{&kV2BlackwellOneNode, 8, kDispatch, kFp8Pairs, 726},
    PublishedLeg{&kHybridHopper, 16, kDispatch, kFp8, 68.48},
    PublishedLeg{&kHybridHopper, 16, kDispatch, kBf16, 71.71},
    PublishedLeg{&kHybridHopper, 16, kCombine, kBf16, 62.95},
    PublishedLeg{&kHybridHopper, 32, kDispatch, kFp8, 55.35},
    PublishedLeg{&kHybridHopper, 32, kDispatch, kBf16, 57.69},
    PublishedLeg{&kHybridHopper, 32, kCombine, kBf16, 57.46},
    PublishedLeg{&kHybridHopper, 64, kDispatch, kFp8, 46.52},
    PublishedLeg{&kHybridHopper, 64, kDispatch, kBf16, 49.97},
    PublishedLeg{&kHybridHopper, 64, kCombine, kBf16, 49.77},
    PublishedLeg{&kEfa, 16, kDispatch, kFp8Pairs, 0, 1065},
    PublishedLeg{&kHybridGb200, 8, kDispatch, kFp8, 713.98},
    PublishedLeg{&kHybridGb200, 8, kDispatch, kBf16, 764.03},
    PublishedLeg{&kHybridGb200, 8, kCombine, kBf16, 737.13},
    PublishedLeg{&kHybridGb200, 16, kDispatch, kFp8, 650.48},
    PublishedLeg{&kHybridGb200, 16, kDispatch, kBf16, 706.95},
    PublishedLeg{&kHybridGb200, 16, kCombine, kBf16, 666.26},
    PublishedLeg{&kHybridGb200, 24, kDispatch, kFp8, 577.96},
    PublishedLeg{&kHybridGb200, 24, kDispatch, kBf16, 665.97},
    PublishedLeg{&kHybridGb200, 24, kCombine, kBf16, 639.80},
    PublishedLeg{&kHybridGb200, 32, kDispatch, kFp8, 538.86},
    PublishedLeg{&kHybridGb200, 32, kDispatch, kBf16, 642.23},
    PublishedLeg{&kHybridGb200, 32, kCombine, kBf16, 605.15},
    PublishedLeg{&kHybridGb200, 36, kDispatch, kFp8, 489.27},
    PublishedLeg{&kHybridGb200, 36, kDispatch, kBf16, 632.31},
    PublishedLeg{&kHybridGb200, 36, kCombine, kBf16, 596.99},
};

// Bytes of one dispatch that ranks 4 to 14 report in the log that kEfa names.
constexpr std::array<int64_t, 11> kLogged = {400593024, 401401728, 397433088, 399904128,
                                             397245888, 399499776, 401364288, 399177792,
                                             400622976, 399612096, 402105600};

struct Rows {
  double to_ranks = 0, to_domains = 0;
};

Rows rows_of(const PublishedSeries& series, int64_t ranks) {
  const int64_t domains = std::max<int64_t>(1, ranks / series.cluster.domain);
  RoutingOdds odds{.experts = series.experts + series.experts_per_rank * ranks, .top_k = 8};
  if (series.kept_domains != 0) {
    odds.groups = domains;
    odds.kept_groups = std::min(domains, series.kept_domains);
  }
  const auto tokens = static_cast<double>(series.tokens);
  return {.to_ranks = tokens * (series.once_per_rank ? unique_places(odds, ranks)
                                                     : static_cast<double>(odds.top_k)),
          .to_domains = tokens * unique_places(odds, domains)};
}

Cluster cluster_of(const PublishedLeg& leg) {
  Cluster cluster = leg.series->cluster;
  cluster.ranks = leg.ranks;
  return cluster;
}

LegBytes bytes_of(const PublishedLeg& leg) {
  const Rows rows = rows_of(*leg.series, leg.ranks);
  return leg_bytes(cluster_of(leg), leg.series->path, rows.to_ranks * leg.row_bytes,
                   rows.to_domains * leg.row_bytes);
}

}  // namespace

std::span<const PublishedLeg> published_legs() { return kLegs; }

double published_seconds(const PublishedLeg& leg) {
  if (leg.gb_per_s == 0) return leg.microseconds * 1e-6;
  const Rows rows = rows_of(*leg.series, leg.ranks);
  const bool ranks = leg.series->counted == Counted::kRanks;
  return (ranks ? rows.to_ranks : rows.to_domains) * leg.row_bytes / (leg.gb_per_s * 1e9);
}

double modelled_seconds(const PublishedLeg& leg, const LinkFit& fit) {
  return leg_seconds(cluster_of(leg), leg.series->path, bytes_of(leg), fit);
}

LinkFit fit_links(Half half) {
  struct Point {
    Cluster cluster;
    Path path;
    LegBytes bytes;
    double seconds;
  };
  std::vector<Point> points;
  for (size_t i = 0; i < kLegs.size(); ++i) {
    if (is_held_back(i) != (half == Half::kHeldBack)) continue;
    points.push_back({cluster_of(kLegs[i]), kLegs[i].series->path, bytes_of(kLegs[i]),
                      published_seconds(kLegs[i])});
  }
  const auto error = [&](const LinkFit& fit) {
    double sum = 0;
    for (const auto& [cluster, path, bytes, seconds] : points) {
      const double off = std::log(leg_seconds(cluster, path, bytes, fit) / seconds);
      sum += off * off;
    }
    return sum;
  };
  // Changes one number at a time by a factor, which shrinks when no change reduces the error. A fit
  // of four numbers to some tens of points needs nothing better.
  LinkFit best{.nvlink_share = 1, .nic_share = 1, .seconds = 1e-5, .seconds_per_peer = 1e-7};
  double least = error(best);
  for (double factor = 2; factor > 1 + 1e-5;) {
    bool is_better = false;
    for (double LinkFit::*number : {&LinkFit::nvlink_share, &LinkFit::nic_share, &LinkFit::seconds,
                                    &LinkFit::seconds_per_peer})
      for (const double by : {factor, 1 / factor}) {
        LinkFit tried = best;
        tried.*number *= by;
        if (const double off = error(tried); off < least) {
          least = off;
          best = tried;
          is_better = true;
        }
      }
    if (!is_better) factor = std::sqrt(factor);
  }
  return best;
}

PublishedBytes published_bytes() {
  return {.series = &kEfa, .ranks = 16, .row_bytes = kFp8Pairs, .logged = kLogged};
}

double modelled_bytes(const PublishedBytes& bytes) {
  return rows_of(*bytes.series, bytes.ranks).to_ranks * bytes.row_bytes;
}

}  // namespace moxie
