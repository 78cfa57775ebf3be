// The order in which experts are chosen: larger score first, then smaller id; NaN last.
#pragma once

#include <bit>
#include <cstdint>

namespace moxie {

// Whether (a, i) comes before (b, j).
constexpr bool ranks_before(float a, int64_t i, float b, int64_t j) {
  const bool a_nan = a != a, b_nan = b != b;
  if (a_nan != b_nan) return b_nan;
  if (!a_nan && a != b) return a > b;
  return i < j;
}

// The same order with integer keys: (a, i) comes before (b, j) if its key is larger, or if the keys
// are equal and i < j. No score has the key 0, so 0 can mean "none".
constexpr uint32_t rank_key(float score) {
  if (score != score) return 1;
  const auto bits = std::bit_cast<uint32_t>(score + 0.f);  // -0 becomes 0: they are equal
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Writes the first k experts in that order, k <= experts. Insertion into a sorted list of k: most
// scores lose to its last entry with one comparison.
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
