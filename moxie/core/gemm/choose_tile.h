// Which tile the Hopper kernel takes for a problem, and in which order it visits the tiles. A pure
// function of what the host knows, sizes and the device: offs stay on the device.
#pragma once

#include <cstdint>

namespace moxie {

// Which size is ragged: rows in forward and dgrad, the depth (k) in wgrad; n never is.
enum class Ragged : uint8_t { kRows, kDepth };

struct GemmProblem {
  Ragged ragged;
  int64_t groups;
  int64_t rows;  // of the result, all groups together
  int64_t n, k;  // k: of one group, or what is to be expected of it where it is ragged
  int pairs;     // of CTAs that run at a time: half the multiprocessors
};

// Rows of the result that a CTA computes; it is always 128 columns.
inline constexpr int kTallRows = 192, kFlatRows = 128;

struct TileChoice {
  int rows;  // kTallRows or kFlatRows
  int band;  // pairs of CTAs side by side (256 columns each) that walk down the rows together
};

TileChoice choose_tile(const GemmProblem& problem);

}  // namespace moxie
