#include "moxie/core/quantize/tile.cuh"
#include "moxie/core/requantize/backends.h"

namespace moxie::cuda {

void requantize(const RequantizeArgs& args, const Panels& panels, void* stream) {
  const QuantizeForms forms{.offs = args.offs, .colwise = args.colwise, .rule = args.rule};
  const bool aligned = is_aligned(args.qdata.data, panels.cols, kPatch) && are_aligned(forms);
  with_alignment(aligned, [&]<bool kAligned>() {
    launch_quantize(
        "requantize", forms, panels,
        rowwise_source<kAligned>(args.qdata.data, args.scale.data, args.block, panels.cols),
        stream);
  });
}

}  // namespace moxie::cuda
