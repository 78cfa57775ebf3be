#include "moxie/core/quantize/backends.h"

namespace moxie::cpu {

void quantize(const QuantizeArgs& args, const Panels& panels, const Exec&) {
  ref::quantize(args, panels);
}

}  // namespace moxie::cpu
