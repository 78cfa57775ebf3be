// The backends of split; arguments arrive checked. Private to this folder.
#pragma once

#include "moxie/core/split/split.h"

namespace moxie {

namespace ref {
void split(const SplitArgs& args);
}
namespace cuda {
void split(const SplitArgs& args, void* stream);
}

}  // namespace moxie
