// Splits f32 into bf16 terms that add up to it (core/split), for GEMMs on tensor cores.
#pragma once

#include "moxie/torch/view.h"

namespace moxie::ops {

// The op _split_bf16: x f32 [R, C] -> bf16 [R, terms * C], each row's terms side by side.
Tensor terms_of(const Tensor& x, at::IntArrayRef terms);

// terms_of() x, and in the same launch as many copies of w, bf16 [E, D], one below the other: the
// operands of the product x w.
struct Factors {
  Tensor terms, copies;  // [R, terms * E], [terms * E, D]
};
Factors factors_of(const Tensor& x, at::IntArrayRef terms, const Tensor& w);

}  // namespace moxie::ops
