// Finds where a loss that is not finite comes from.
#pragma once

#include <string>

#include "moxie/cli/train/optimizer.h"

namespace moxie::cli {

// Says what is not finite first, as in "the output of layers.1.moe is not finite, first in expert
// 5". It looks at the weights, then at the output of each part for these windows, then at the
// gradients, and runs a forward pass for that.
std::string find_not_finite(LanguageModelImpl& model, const AdamW& optimizer,
                            const at::Tensor& windows);

}  // namespace moxie::cli
