// finish_products: what a router's backward has left to do after its GEMMs, in one launch. It
// rounds the gradient of x to bf16, adds another gradient of x to it, and adds up the products
// that the terms of dlogits (split.h) gave of the gradient of the weight.
#pragma once

#include <optional>

#include "moxie/core/base/exec.h"
#include "moxie/core/base/view.h"
#include "moxie/core/format/bf16.h"

namespace moxie {

// to = bf16(from); with `add`, to = bf16(to + add), the sum in f32.
struct RoundedSum {
  View<const float> from;  // [R, C]
  std::optional<View<const bf16>> add;
  View<bf16> to;  // result
};

// to = 0 + terms[0] + terms[1] + terms[2], in this order in f32; then rounded, if `to` is bf16.
struct TermSum {
  View<const float> terms;  // [kBf16Terms, E, C]
  FloatView to;             // result, [E, C]
};

struct FinishProductsArgs {
  std::optional<RoundedSum> dx;
  std::optional<TermSum> dweight;
};
void finish_products(const FinishProductsArgs& args, const Exec& exec);

}  // namespace moxie
