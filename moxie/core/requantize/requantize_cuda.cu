#include "moxie/core/quantize/tile.cuh"
#include "moxie/core/requantize/backends.h"

namespace moxie::cuda {

void requantize(const RequantizeArgs& args, const Panels& panels, void* stream) {
  const std::optional<Operand> rowwise, colwise = args.colwise;
  const QuantizeForms forms{
      .op = "requantize", .rowwise = rowwise, .colwise = colwise, .rule = args.rule};
  const bool aligned = is_aligned(args.qdata.data, panels.cols, kPatch) && forms.is_aligned();
  with_alignment(aligned, [&]<bool kAligned>() {
    launch_quantize(
        forms, panels,
        rowwise_source<kAligned>(args.qdata.data, args.scale.data, args.block, panels.cols),
        stream);
  });
}

}  // namespace moxie::cuda
