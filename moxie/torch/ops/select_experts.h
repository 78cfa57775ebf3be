// What a router makes of its logits (core/select). In f64, which tests take derivatives of, torch's
// own ops compute it.
#pragma once

#include "moxie/core/select/select.h"
#include "moxie/torch/view.h"

namespace moxie::ops {

Weighting parse_weighting(std::string_view score, bool normalize, double scale);

// [T, k] of logits [T, E], made of differentiable ops.
Tensor composite_weights(const Tensor& logits, const Tensor& ids, const Weighting& how);

}  // namespace moxie::ops
