// The order in which experts are chosen: larger score first, then smaller id; NaN last.
#pragma once

#include <bit>
#include <cstdint>

namespace moxie {

// Whether expert i, with score a, comes before expert j, with score b.
constexpr bool ranks_before(float a, int64_t i, float b, int64_t j) {
  const bool a_nan = a != a, b_nan = b != b;
  if (a_nan != b_nan) return b_nan;
  if (!a_nan && a != b) return a > b;
  return i < j;
}

// Maps a score to an integer that gives the order of ranks_before(): the expert with the larger key
// comes first, and of equal keys the one with the smaller id. No score has the key 0, so 0 can mean
// "none".
constexpr uint32_t rank_key(float score) {
  if (score != score) return 1;
  const auto bits = std::bit_cast<uint32_t>(score + 0.f);  // -0 becomes 0: they are equal
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Writes the ids of the k experts that come first in the order of ranks_before(), k <= experts.
// Inserts into a sorted list of k, because most scores lose to its last entry with one comparison.
inline void keep_best(const float* scores, int64_t experts, int64_t k, int32_t* ids) {
  int64_t found = 0;
  for (int32_t e = 0; e < experts; ++e) {
    if (found == k && !ranks_before(scores[e], e, scores[ids[k - 1]], ids[k - 1])) continue;
    int64_t at = found < k ? found++ : k - 1;
    for (; at > 0 && ranks_before(scores[e], e, scores[ids[at - 1]], ids[at - 1]); --at)
      ids[at] = ids[at - 1];
    ids[at] = e;
  }
}

}  // namespace moxie
