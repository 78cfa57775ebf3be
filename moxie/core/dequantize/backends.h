// The backends of dequantize; arguments arrive checked. Private to this folder.
#pragma once

#include "moxie/core/dequantize/dequantize.h"

namespace moxie {

namespace ref {
void dequantize(const DequantizeArgs& args, const Panels& panels);
}
namespace cpu {
void dequantize(const DequantizeArgs& args, const Panels& panels, const Exec& exec);
}
namespace cuda {
void dequantize(const DequantizeArgs& args, const Panels& panels, void* stream);
}

}  // namespace moxie
