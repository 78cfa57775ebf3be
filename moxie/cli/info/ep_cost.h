// Prints the tables of `moxie info --ep`: bytes, times, and the share of time that the exchange
// adds, for each size of the EP group.
#pragma once

#include "moxie/cli/info/ep_flags.h"

namespace moxie::cli {

void print_ep_cost(const EpFlags& flags, Output output);

}  // namespace moxie::cli
