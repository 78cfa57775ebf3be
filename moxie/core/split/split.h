// split: f32 values as sums of bf16 terms, so that tensor cores multiply them and lose nothing.
//
// The first term is the value rounded to bf16, each further one is what is left, rounded. Three
// terms have 24 bits, so they add up to the value exactly if it is at least 2^-110, or 0; below
// that bf16 has no room for the last bits, and the error is at most 2^-134. Infinity and NaN are
// their first term, and 0 the others. A finite value beyond bf16's largest takes that as its first
// term.
#pragma once

#include <array>
#include <bit>

#include "moxie/core/base/exec.h"
#include "moxie/core/base/view.h"
#include "moxie/core/format/bf16.h"

namespace moxie {

inline constexpr int kBf16Terms = 3;
inline constexpr int kMaxSplitTerms = 6;

constexpr std::array<bf16, kBf16Terms> bf16_terms(float value) {
  constexpr uint16_t kInfinity = 0x7f80;
  std::array<bf16, kBf16Terms> terms;
  const bool is_finite = (std::bit_cast<uint32_t>(value) & 0x7f800000) != 0x7f800000;
  for (int i = 0; i < kBf16Terms; ++i) {
    bf16 term = to_bf16(value);
    if (is_finite && (term.bits & 0x7fff) == kInfinity) --term.bits;
    terms[i] = term;
    value = is_finite ? value - to_float(term) : 0;
  }
  return terms;
}

// Which terms, side by side: a product of split operands needs some of them more than once.
struct SplitTerms {
  std::array<uint8_t, kMaxSplitTerms> term{};  // 0 to kBf16Terms - 1
  int count = 0;
};

struct SplitArgs {
  View<const float> x;  // [R, C]
  SplitTerms terms;
  View<bf16> out;  // result, [R, count * C]: of each row, one term of all columns, then the next
};
void split(const SplitArgs& args, const Exec& exec);

}  // namespace moxie
