// Prints `moxie info --ep --published`: the published times that the cost model was fitted to or
// tested on, beside the model's.
#pragma once

#include "moxie/cli/info/ep_flags.h"

namespace moxie::cli {

void print_published(Output output);

}  // namespace moxie::cli
