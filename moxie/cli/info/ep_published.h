// `moxie info --ep --published`: the points that the cost model was fitted to and tested on.
#pragma once

#include "moxie/cli/info/ep_flags.h"

namespace moxie::cli {

void print_published(Output output);

}  // namespace moxie::cli
