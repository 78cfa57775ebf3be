#include "moxie/core/groups/backends.h"

namespace moxie::cpu {

void pad_groups(const PadGroupsArgs& args, const Exec&) { ref::pad_groups(args); }
void unpad_groups(const UnpadGroupsArgs& args, const Exec&) { ref::unpad_groups(args); }

}  // namespace moxie::cpu
