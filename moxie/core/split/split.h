// split: f32 values as sums of bf16 terms, so that bf16 tensor cores multiply them without loss.
//
// The first term is the value rounded to bf16; each further term is the remainder, rounded. Three
// terms have 24 bits, so they add up to the value exactly if its magnitude is 0 or at least 2^-110;
// below that, bf16 lacks the exponent range for the last bits, and the error is at most 2^-134.
// Infinity and NaN have themselves as first term and 0 as the others. A finite value that rounds to
// infinity takes bf16's largest finite value as its first term.
#pragma once

#include <array>
#include <bit>
#include <optional>

#include "moxie/core/base/exec.h"
#include "moxie/core/base/view.h"
#include "moxie/core/format/bf16.h"

namespace moxie {

inline constexpr int kBf16Terms = 3;
inline constexpr int kMaxSplitTerms = 6;  // f32's precision takes six products of terms

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

// The terms to write, in order; a product of split operands needs some terms more than once.
struct SplitTerms {
  std::array<uint8_t, kMaxSplitTerms> term{};  // 0 to kBf16Terms - 1
  int count = 0;
};

// The other operand of a product with terms may be in bf16 already: each of its rows is then needed
// once per term.
struct Copies {
  View<const bf16> x;  // [E, D]
  View<bf16> out;      // result, [n * E, D]: all of x, n times
};

struct SplitArgs {
  View<const float> x;  // [R, C]
  SplitTerms terms;
  View<bf16> out;  // result, [R, count * C]: a row has the first term of all columns, then the next
  std::optional<Copies> copies = std::nullopt;  // made in the same launch
};
void split(const SplitArgs& args, const Exec& exec);

}  // namespace moxie
