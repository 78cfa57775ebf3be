// The backends of select; arguments arrive checked. Private to this folder.
#pragma once

#include "moxie/core/select/select.h"

namespace moxie {

namespace ref {
void select(const SelectArgs& args);
void select_backward(const SelectBackwardArgs& args);
}  // namespace ref
namespace cpu {
void select(const SelectArgs& args, const Exec& exec);
void select_backward(const SelectBackwardArgs& args, const Exec& exec);
}  // namespace cpu
namespace cuda {
void select(const SelectArgs& args, void* stream);
void select_backward(const SelectBackwardArgs& args, void* stream);
}  // namespace cuda

}  // namespace moxie
