// The backends of the group ops; arguments arrive checked. Private to this folder.
#pragma once

#include "moxie/core/groups/groups.h"

namespace moxie {

namespace ref {
void pad_groups(const PadGroupsArgs& args);
void unpad_groups(const UnpadGroupsArgs& args);
void padded_offs(const PaddedOffsArgs& args);
}  // namespace ref
namespace cpu {
void pad_groups(const PadGroupsArgs& args, const Exec& exec);
void unpad_groups(const UnpadGroupsArgs& args, const Exec& exec);
}  // namespace cpu
namespace cuda {
void pad_groups(const PadGroupsArgs& args, void* stream);
void unpad_groups(const UnpadGroupsArgs& args, void* stream);
void padded_offs(const PaddedOffsArgs& args, void* stream);
}  // namespace cuda

}  // namespace moxie
