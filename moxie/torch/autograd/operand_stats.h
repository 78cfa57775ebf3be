// Quantization errors of the operands of a GEMM (stats.h), in the order of kStatsParts.
#pragma once

#include "moxie/torch/ops.h"

namespace moxie::ops {

using at::Tensor;

inline constexpr int64_t kForwardParts = 4;  // the first of kStatsParts; those of dy follow

// x of forward and x of wgrad (x_t): the same tensor, unless routing weights are applied for wgrad.
struct ForwardParts {
  const Tensor &x, &x_t, &w;
};
Tensor stats_of_forward(const ForwardParts& parts, const std::optional<Tensor>& offs,
                        std::string_view recipe);
Tensor stats_of_gradient(const Tensor& dy, const std::optional<Tensor>& offs,
                         std::string_view recipe);

}  // namespace moxie::ops
