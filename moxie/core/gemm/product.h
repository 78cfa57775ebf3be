// product: the three passes for operands in bf16 or f32, computed in f32 or better:
//   forward  out[r, n]    = sum over k of a[r, k] * b[g, n, k]  (+ bias)      for r in group g
//   dgrad    out[r, k]    = sum over n of a[r, n] * b[g, n, k]
//   wgrad    out[g, n, k] = sum over r in group g of a[r, n] * b[r, k]
// Simple kernels for what the vendor's grouped GEMM does not take: any sizes, empty groups, f32
// results, accumulation into a gradient. Deterministic.
#pragma once

#include "moxie/core/gemm/grouped_wgrad.h"

namespace moxie {

enum class Pass : uint8_t { kForward, kDgrad, kWgrad };

constexpr const char* name(Pass pass) {
  return pass == Pass::kForward ? "forward" : pass == Pass::kDgrad ? "dgrad" : "wgrad";
}

// Where a field lists three shapes, they are those of forward, dgrad and wgrad.
struct ProductArgs {
  Pass pass = Pass::kForward;
  ConstFloatView a;                                   // [R, K], [R, N], [R, N]
  ConstFloatView b;                                   // [G, N, K], [G, N, K], [R, K]; format of a
  OptionalOffs offs = std::nullopt;                   // [G]; absent: one group
  std::optional<ConstFloatView> bias = std::nullopt;  // forward: [N] or [G, N]
  FloatView out = {};         // [R, N], [R, K], [G, N, K]; rows that no group covers are 0
  Sum sum = Sum::kOverwrite;  // wgrad: kAdd needs f32
};

// Backends: ref and cuda (on a CPU the torch layer uses torch's GEMM).
void product(const ProductArgs& args, const Exec& exec);

// Completes a GEMM of another library: zeroes the rows of out past offs[-1], and adds to every
// other row the bias of its group.
struct FinishRowsArgs {
  View<const int32_t> offs;                           // [G]
  std::optional<ConstFloatView> bias = std::nullopt;  // [C] or [G, C]
  FloatView out = {};                                 // [R, C]
};
void finish_rows(const FinishRowsArgs& args, const Exec& exec);

}  // namespace moxie
