#include "moxie/core/quantize/backends.h"
#include "moxie/core/quantize/tile.cuh"

namespace moxie::cuda {

void quantize(const QuantizeArgs& args, const Panels& panels, void* stream) {
  const QuantizeForms forms{
      .op = "quantize", .rowwise = args.rowwise, .colwise = args.colwise, .rule = args.rule};
  with_format(args.x.format, [&]<class T>() {
    launch_quantize(forms, panels, float_source<T>(args.x.data, panels.cols), stream);
  });
}

}  // namespace moxie::cuda
