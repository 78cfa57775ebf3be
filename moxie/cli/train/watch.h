// Where a loss that is not finite comes from.
#pragma once

#include <string>

#include "moxie/cli/train/optimizer.h"

namespace moxie::cli {

// "the output of layers.1.moe is not finite, first in expert 5": looks at weights, then at what
// each part computes from the windows, then at gradients. Takes a forward pass.
std::string find_not_finite(LanguageModelImpl& model, const AdamW& optimizer,
                            const at::Tensor& windows);

}  // namespace moxie::cli
