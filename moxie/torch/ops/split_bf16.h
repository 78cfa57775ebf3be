// f32 as sums of bf16 terms (core/split), for GEMMs on tensor cores.
#pragma once

#include "moxie/torch/view.h"

namespace moxie::ops {

// The op _split_bf16: x f32 [R, C] -> bf16 [R, terms * C], one term after the other.
Tensor terms_of(const Tensor& x, at::IntArrayRef terms);

}  // namespace moxie::ops
