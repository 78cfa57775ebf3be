// f32 as sums of bf16 terms (core/split), for products on tensor cores.
#pragma once

#include "moxie/torch/view.h"

namespace moxie::ops {

// What _split_bf16 returns: x f32 [R, C] -> bf16 [R, terms * C], side by side.
Tensor terms_of(const Tensor& x, at::IntArrayRef terms);

}  // namespace moxie::ops
