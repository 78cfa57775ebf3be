// What the exchange of expert parallelism costs: bytes and seconds of each leg, beside the seconds
// of the experts' products. Pure arithmetic; docs/COST_MODEL.md explains it and says how far it
// holds.
#pragma once

#include <array>
#include <cstdint>

#include "moxie/core/cost/routing_cost.h"
#include "moxie/core/layout/wire.h"

namespace moxie {

// Ranks, and the links between them; one GPU per rank. Speeds are those of one GPU in one
// direction, in bytes per second, as vendors state them.
struct Cluster {
  int64_t ranks = 8;
  int64_t domain = 8;  // consecutive ranks that NVLink joins
  double nvlink = 450e9;
  double nic = 50e9;  // between domains
};

// What links give of their stated speed, and what a leg takes before its first byte: fitted to
// published times, rounded to two digits. published_legs.h has the points, and a test fits again.
// No point up to EP 256 shows a time per peer: those kernels write to all peers at once.
struct LinkFit {
  double nvlink_share = 0.69;
  double nic_share = 0.85;
  double seconds = 27e-6;
  double seconds_per_peer = 0;
};

enum class Path : uint8_t {
  kDirect,     // a row goes straight to its rank
  kForwarded,  // a row crosses to each domain once, and NVLink takes it to its ranks there
};

// What one rank sends in a leg.
struct LegBytes {
  double all = 0;     // what is packed: its message to itself included
  double nvlink = 0;  // what leaves by NVLink; with kForwarded also what it forwards
  double nic = 0;
};

// `to_ranks` are the bytes if a row goes to each of its ranks, `to_domains` if it goes to each of
// its domains (which kDirect does not read). Each rank, and each domain, gets as much as the
// others.
LegBytes leg_bytes(const Cluster& cluster, Path path, double to_ranks, double to_domains);

// NVLink and NIC work at the same time; the slower one decides. A rank alone takes no time.
double leg_seconds(const Cluster& cluster, Path path, const LegBytes& bytes,
                   const LinkFit& fit = {});

enum class WireFormat : uint8_t { kBf16, kFp8 };  // of x and dy; y and dx are bf16

struct ExchangeCostArgs {
  RoutingOdds odds;
  Cluster cluster;
  int64_t tokens = 4096;  // of a rank
  int64_t dim = 7168;     // D
  int64_t hidden = 2048;  // F, of an expert
  WireFormat wire = WireFormat::kFp8;
  int64_t block = 128;        // elements of a row that share a scale, with kFp8
  bool once_per_rank = true;  // x and dy go to a rank once, not once for each of its experts
  Path path = Path::kDirect;  // of x and dy; y and dx are rows of pairs, which no domain shares
  double imbalance = 1;       // rows of the fullest rank over the mean; it decides every leg's time
  double flops_per_second = 0;  // of the experts' products
  LinkFit fit;
};

struct LegCost {
  int64_t rows = 0;
  LegBytes bytes;
  double seconds = 0;
};

struct ExchangeCost {
  double ranks_per_token = 0;
  std::array<LegCost, 4> legs;  // in the order of Leg
  double products_seconds = 0;  // of the experts, forward and backward

  double bytes() const;    // LegBytes::all of the four legs
  double seconds() const;  // of the four legs
  // The share of forward and backward in which links work and products wait: without overlap, and
  // with all the overlap that there can be.
  double exposed() const;
  double exposed_overlapped() const;
};

// `experts` must be a multiple of `ranks`, and `ranks` of `domain`, unless one domain holds them
// all.
ExchangeCost exchange_cost(const ExchangeCostArgs& args);

}  // namespace moxie
