#include "moxie/core/scale_layout/backends.h"

namespace moxie::cpu {

void swizzle_scale(const SwizzleArgs& args, const Panels& panels, const Exec&) {
  ref::swizzle_scale(args, panels);
}
void unswizzle_scale(const UnswizzleArgs& args, const Panels& panels, const Exec&) {
  ref::unswizzle_scale(args, panels);
}
void replicate_scale(const ReplicateArgs& args, const Exec&) { ref::replicate_scale(args); }
void compact_scale(const CompactArgs& args, const Exec&) { ref::compact_scale(args); }

}  // namespace moxie::cpu
