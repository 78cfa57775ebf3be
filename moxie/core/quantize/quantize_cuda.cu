#include "moxie/core/quantize/backends.h"
#include "moxie/core/quantize/tile.cuh"

namespace moxie::cuda {

void quantize(const QuantizeArgs& args, const Panels& panels, void* stream) {
  const QuantizeForms forms{
      .op = "quantize", .rowwise = args.rowwise, .colwise = args.colwise, .rule = args.rule};
  with_format(args.x.format, [&]<class T>() {
    const auto* x = static_cast<const T*>(args.x.data);
    const bool aligned = is_aligned(x, panels.cols, kPatch) && forms.is_aligned();
    with_alignment(aligned, [&]<bool kAligned>() {
      launch_quantize(forms, panels, FloatSource<T, kAligned>{x, panels.cols}, stream);
    });
  });
}

}  // namespace moxie::cuda
