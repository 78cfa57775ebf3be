#include "moxie/core/dequantize/backends.h"

namespace moxie::cpu {

void dequantize(const DequantizeArgs& args, const Panels& panels, const Exec&) {
  ref::dequantize(args, panels);
}

}  // namespace moxie::cpu
