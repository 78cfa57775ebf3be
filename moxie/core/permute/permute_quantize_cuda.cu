#include "moxie/core/permute/backends.h"
#include "moxie/core/permute/gather_source.cuh"
#include "moxie/core/quantize/quantize_kernel.cuh"

namespace moxie::cuda {

void permute_quantize(const PermuteQuantizeArgs& args, const Panels& panels, void* stream) {
  const auto start = [&]<class T, bool kAligned>() {
    launch_quantize("permute_quantize", args.forms, panels,
                    GatherSource<T, kAligned>{{},
                                              static_cast<const T*>(args.x.data),
                                              args.slot_of.data,
                                              args.top_k,
                                              panels.rows,
                                              panels.cols,
                                              nullptr},
                    stream);
  };
  if (args.x.format == Format::kF32) return start.template operator()<float, false>();
  with_alignment(are_rows_aligned(static_cast<const bf16*>(args.x.data), panels.cols, kFragment) &&
                     are_forms_aligned(args.forms),
                 [&]<bool kAligned>() { start.template operator()<bf16, kAligned>(); });
}

}  // namespace moxie::cuda
