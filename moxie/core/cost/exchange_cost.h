// What the exchange of expert parallelism costs: bytes and seconds of each leg, beside the seconds
// of the experts' products. Pure arithmetic; docs/COST_MODEL.md explains it and says how accurate
// it is.
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
  int64_t domain = 8;  // consecutive ranks that NVLink connects
  double nvlink = 450e9;
  double nic = 50e9;  // between domains
};

// The share of its stated speed that a link reaches, and the time before a leg's first byte. Both
// are fitted to published times and rounded to two digits: published_legs.h has the times, and a
// test repeats the fit. No time up to 256 ranks shows a cost per peer, because the kernels that
// were timed write to all peers at once.
struct LinkFit {
  double nvlink_share = 0.69;
  double nic_share = 0.85;
  double seconds = 27e-6;
  double seconds_per_peer = 0;
};

enum class Path : uint8_t {
  kDirect,     // a row goes straight to its rank
  kForwarded,  // a row goes to each domain once, and from there to its ranks by NVLink
};

// What one rank sends in a leg.
struct LegBytes {
  double all = 0;     // in all messages, the one to itself included
  double nvlink = 0;  // sent by NVLink; with kForwarded also what it forwards
  double nic = 0;
};

// Divides what one rank sends among the links. `to_ranks` is its bytes if a row goes to each of its
// ranks, `to_domains` its bytes if a row goes to each of its domains (not used by kDirect). Assumes
// that every rank, and every domain, gets the same number of bytes.
LegBytes leg_bytes(const Cluster& cluster, Path path, double to_ranks, double to_domains);

// Seconds of a leg. NVLink and NIC work at the same time, so the slower one decides. In a group of
// one rank a leg takes no time.
double leg_seconds(const Cluster& cluster, Path path, const LegBytes& bytes,
                   const LinkFit& fit = {});

enum class WireFormat : uint8_t { kBf16, kFp8 };  // for x and dy; y and dx are sent in bf16

struct ExchangeCostArgs {
  RoutingOdds odds;
  Cluster cluster;
  int64_t tokens = 4096;  // of a rank
  int64_t dim = 7168;     // D
  int64_t hidden = 2048;  // F, of an expert
  WireFormat wire = WireFormat::kFp8;
  int64_t block = 128;          // elements of a row that share a scale, with kFp8
  bool once_per_rank = true;    // x and dy go to a rank once, not once for each of its experts
  Path path = Path::kDirect;    // of x and dy; y and dx go directly: each row belongs to one pair
  double imbalance = 1;         // rows of the fullest rank over the mean; all times are that rank's
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
  std::array<LegCost, 4> legs;  // indexed by Leg
  double products_seconds = 0;  // of the experts, forward and backward

  double bytes() const;    // sum of LegBytes::all over the four legs
  double seconds() const;  // of the four legs
  // The share of forward and backward in which products wait for the links: exposed() if links and
  // products take turns, exposed_overlapped() if they overlap as far as they can.
  double exposed() const;
  double exposed_overlapped() const;
};

// `experts` must be a multiple of `ranks`, and `ranks` of `domain` unless `domain` is larger.
ExchangeCost exchange_cost(const ExchangeCostArgs& args);

}  // namespace moxie
