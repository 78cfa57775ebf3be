// The tables of `moxie info --ep`: bytes, times and exposed shares for each size of the group.
#pragma once

#include "moxie/cli/info/ep_flags.h"

namespace moxie::cli {

void print_ep_cost(const EpFlags& flags, Output output);

}  // namespace moxie::cli
