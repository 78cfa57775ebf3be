// The backends of quantize; arguments arrive checked. Private to this folder.
#pragma once

#include "moxie/core/quantize/quantize.h"

namespace moxie {

namespace ref {
void quantize(const QuantizeArgs& args, const Panels& panels);
}
namespace cpu {
void quantize(const QuantizeArgs& args, const Panels& panels, const Exec& exec);
}
namespace cuda {
void quantize(const QuantizeArgs& args, const Panels& panels, void* stream);
}

}  // namespace moxie
