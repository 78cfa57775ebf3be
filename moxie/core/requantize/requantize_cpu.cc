#include "moxie/core/requantize/backends.h"

namespace moxie::cpu {

void requantize(const RequantizeArgs& args, const Panels& panels, const Exec&) {
  ref::requantize(args, panels);
}

}  // namespace moxie::cpu
