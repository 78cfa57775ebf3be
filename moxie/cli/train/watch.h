// Finds the origin of a loss that is not finite.
#pragma once

#include <string>

#include "moxie/cli/train/optimizer.h"

namespace moxie::cli {

// "the output of layers.1.moe is not finite, first in expert 5": searches weights, then the output
// of each part for these windows, then gradients. Runs a forward pass.
std::string find_not_finite(LanguageModelImpl& model, const AdamW& optimizer,
                            const at::Tensor& windows);

}  // namespace moxie::cli
