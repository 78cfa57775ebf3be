// What quantization loses of the operands of a product (stats.h), in the order of kStatsParts.
#pragma once

#include "moxie/torch/ops.h"

namespace moxie::ops {

using at::Tensor;

inline constexpr int64_t kForwardParts = 4;  // of kStatsParts; those of dy follow

// x as forward contracts it and as wgrad does: the same tensor, unless wgrad's has weights.
struct ForwardParts {
  const Tensor &x, &x_t, &w;
};
Tensor stats_of_forward(const ForwardParts& parts, const std::optional<Tensor>& offs,
                        std::string_view recipe);
Tensor stats_of_gradient(const Tensor& dy, const std::optional<Tensor>& offs,
                         std::string_view recipe);

}  // namespace moxie::ops
