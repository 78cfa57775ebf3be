// Makes offs for tests, malformed ones too: all vectors over a few values, and random ones for many
// groups.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "tests/support/random.h"

namespace moxie::testing {

inline constexpr int32_t kInt32Min = std::numeric_limits<int32_t>::min();
inline constexpr int32_t kInt32Max = std::numeric_limits<int32_t>::max();

// Calls f(offs) for every vector of `groups` entries from `values`.
template <class F>
void for_each_offs(int groups, const std::vector<int32_t>& values, F&& f) {
  std::vector<size_t> digits(groups, 0);
  std::vector<int32_t> offs(groups, values[0]);
  for (;;) {
    f(offs);
    int i = 0;
    while (i < groups && ++digits[i] == values.size()) digits[i] = 0, offs[i] = values[0], ++i;
    if (i == groups) return;
    offs[i] = values[digits[i]];
  }
}

enum class OffsAre { kGood, kWrongHereAndThere, kAnything };

inline std::vector<int32_t> random_offs(Random& random, int groups, int rows, OffsAre are) {
  std::vector<int32_t> offs(groups);
  for (int32_t& end : offs) end = static_cast<int32_t>(random.between(0, rows));
  if (are != OffsAre::kAnything) std::sort(offs.begin(), offs.end());
  for (int32_t& end : offs) {
    if (are == OffsAre::kGood || !random.chance(are == OffsAre::kAnything ? 50 : 2)) continue;
    end = random.chance(30) ? random.pick({kInt32Min, -1, rows + 1, kInt32Max})
                            : static_cast<int32_t>(random.bits());
  }
  return offs;
}

}  // namespace moxie::testing
