// Chooses the tile of the Hopper kernel and the order of tiles. A pure function of the sizes and
// the device; it does not see offs, which stay on the device.
#pragma once

#include <cstdint>

namespace moxie {

// Which size differs between groups: rows in forward and dgrad, depth (k) in wgrad; n never does.
enum class Ragged : uint8_t { kRows, kDepth };

struct GemmProblem {
  Ragged ragged;
  int64_t groups;
  int64_t rows;  // of the result, all groups together
  int64_t n, k;  // k: of one group; the mean if it is ragged
  int pairs;     // CTA pairs that run at once: half the number of SMs
};

// Rows of a CTA's tile; it always has 128 columns.
inline constexpr int kTallRows = 192, kFlatRows = 128;

struct TileChoice {
  int rows;  // kTallRows or kFlatRows
  int band;  // width of a band, in CTA pairs (256 columns each); tiles go row by row in a band
};

TileChoice choose_tile(const GemmProblem& problem);

}  // namespace moxie
