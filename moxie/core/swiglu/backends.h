// The backends of swiglu; arguments arrive checked. Private to this folder.
#pragma once

#include "moxie/core/swiglu/swiglu.h"

namespace moxie {

namespace ref {
void swiglu(const SwigluArgs& args);
void swiglu_backward(const SwigluBackwardArgs& args);
}  // namespace ref
namespace cpu {
void swiglu(const SwigluArgs& args, const Exec& exec);
void swiglu_backward(const SwigluBackwardArgs& args, const Exec& exec);
}  // namespace cpu
namespace cuda {
void swiglu(const SwigluArgs& args, void* stream);
void swiglu_backward(const SwigluBackwardArgs& args, void* stream);
}  // namespace cuda

}  // namespace moxie
