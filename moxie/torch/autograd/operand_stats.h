// Measures what quantization loses of the operands of a linear (stats.h), in the order of
// kStatsParts.
#pragma once

#include "moxie/torch/ops.h"

namespace moxie::ops {

using at::Tensor;

inline constexpr int64_t kForwardParts = 4;  // x, w, x_t and w_t; dy and dy_t follow

// x is forward's operand, x_t wgrad's: the same tensor, except for w2, where wgrad's has been
// multiplied by the routing weights.
struct ForwardParts {
  const Tensor &x, &x_t, &w;
};
Tensor stats_of_forward(const ForwardParts& parts, const std::optional<Tensor>& offs,
                        std::string_view recipe);
Tensor stats_of_gradient(const Tensor& dy, const std::optional<Tensor>& offs,
                         std::string_view recipe);

}  // namespace moxie::ops
