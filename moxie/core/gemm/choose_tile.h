// Which tile the Hopper kernel takes for a problem, and in which order it visits the tiles. A pure
// function of sizes that the host knows: offs stay on the device.
#pragma once

#include <cstdint>

namespace moxie {

struct GemmProblem {
  int64_t groups;
  int64_t rows;  // of the result, all groups together
  int64_t n, k;  // k: of one group, or what is to be expected of it where it is ragged
};

struct TileChoice {
  int rows;  // of the result that a CTA computes, 128 or 256; it is always 128 columns
  int band;  // pairs of CTAs side by side (256 columns each) that walk down the rows together
};

TileChoice choose_tile(const GemmProblem& problem);

}  // namespace moxie
