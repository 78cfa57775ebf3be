// The backends of swiglu and of the ops fused with it; arguments arrive checked. Private to this
// folder.
#pragma once

#include "moxie/core/swiglu/swiglu.h"
#include "moxie/core/swiglu/swiglu_quantize.h"

namespace moxie {

// Refuses weights of other shapes and, if the host can read them, slots that are out of range.
void check_weights(const char* op, const std::optional<RowWeights>& weights, int64_t rows,
                   Backend backend);
void check_weights(const char* op, const std::optional<WeightGradient>& weights, const Shape& da,
                   Backend backend);

// Number of rows before the end of the last group. For the backends of the host only: they have
// checked that offs do not decrease.
inline int64_t covered_rows(const SwigluBackwardQuantizeArgs& args) {
  const OptionalOffs& offs = args.forms.offs;
  return offs ? offs->data[offs->dim(0) - 1] : args.da.dim(0);
}

namespace ref {
void swiglu(const SwigluArgs& args);
void swiglu_backward(const SwigluBackwardArgs& args);
void swiglu_quantize(const SwigluQuantizeArgs& args);
void swiglu_backward_quantize(const SwigluBackwardQuantizeArgs& args);
}  // namespace ref
namespace cpu {
void swiglu(const SwigluArgs& args, const Exec& exec);
void swiglu_backward(const SwigluBackwardArgs& args, const Exec& exec);
void swiglu_quantize(const SwigluQuantizeArgs& args, const Panels& panels, const Exec& exec);
void swiglu_backward_quantize(const SwigluBackwardQuantizeArgs& args, const Panels& panels,
                              const Exec& exec);
}  // namespace cpu
namespace cuda {
void swiglu(const SwigluArgs& args, void* stream);
void swiglu_backward(const SwigluBackwardArgs& args, void* stream);
void swiglu_quantize(const SwigluQuantizeArgs& args, const Panels& panels, void* stream);
void swiglu_backward_quantize(const SwigluBackwardQuantizeArgs& args, const Panels& panels,
                              void* stream);
}  // namespace cuda

}  // namespace moxie
