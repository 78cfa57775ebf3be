#include "moxie/core/row_scale/backends.h"

namespace moxie::cpu {

void quantize_row_scale(const RowScaleArgs& args, const Panels& panels, const Exec&) {
  ref::quantize_row_scale(args, panels);
}

}  // namespace moxie::cpu
