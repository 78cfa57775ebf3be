// The definition: dequantize to f32, then quantize.
#include <vector>

#include "moxie/core/dequantize/dequantize.h"
#include "moxie/core/quantize/quantize.h"
#include "moxie/core/requantize/backends.h"

namespace moxie::ref {

void requantize(const RequantizeArgs& args, const Panels&) {
  const Exec exec{.backend = Backend::kRef};
  std::vector<float> x(numel(args.qdata.shape));
  dequantize({.form = Form::kRowwise,
              .block = args.block,
              .layout = args.from_layout,
              .qdata = args.qdata,
              .scale = args.scale,
              .offs = args.offs,
              .x = {x.data(), Format::kF32, args.qdata.shape}},
             exec);
  quantize({.x = {x.data(), Format::kF32, args.qdata.shape},
            .offs = args.offs,
            .rowwise = std::nullopt,
            .colwise = args.colwise,
            .rule = args.rule},
           exec);
}

}  // namespace moxie::ref
