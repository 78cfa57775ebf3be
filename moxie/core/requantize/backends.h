// The backends of requantize; arguments arrive checked. Private to this folder.
#pragma once

#include "moxie/core/requantize/requantize.h"

namespace moxie {

namespace ref {
void requantize(const RequantizeArgs& args, const Panels& panels);
}
namespace cpu {
void requantize(const RequantizeArgs& args, const Panels& panels, const Exec& exec);
}
namespace cuda {
void requantize(const RequantizeArgs& args, const Panels& panels, void* stream);
bool can_gather(const RequantizeArgs& args);
}  // namespace cuda

}  // namespace moxie
