// The gradient of the routing weights, where no tile kernel has made it on its way.
#pragma once

#include "moxie/core/swiglu/backends.h"

namespace moxie::cuda {

// From da and h.
void weight_gradient(const char* op, const WeightGradient& to, const ConstFloatView& da,
                     const ConstFloatView& h, void* stream);
// From the sums of tiles that are in the workspace.
void sum_weight_tiles(const char* op, const WeightGradient& to, void* stream);

}  // namespace moxie::cuda
