// The order in which experts are chosen: the larger score, then the smaller id. NaN comes last.
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

// The same order of scores as integers: (a, i) comes before (b, j) if its key is larger, or its key
// is equal and i < j. 0 is no key: it can stand for "none".
constexpr uint32_t rank_key(float score) {
  if (score != score) return 1;
  const auto bits = std::bit_cast<uint32_t>(score + 0.f);  // -0 becomes 0, which it is equal to
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The first k of the experts in that order, k <= experts. Most scores lose to the last of those
// kept at once, so k insertions in a row are rare.
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
