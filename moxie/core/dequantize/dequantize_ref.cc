#include <algorithm>
#include <cstddef>

#include "moxie/core/base/parallel.h"
#include "moxie/core/dequantize/backends.h"

namespace moxie::ref {

void dequantize(const DequantizeArgs& args, const Panels& panels) {
  const KernelScope scope;
  const bool rowwise = args.form == Form::kRowwise;
  const Block block = args.block;
  std::fill_n(static_cast<std::byte*>(args.x.data), numel(args.x.shape) * bytes_of(args.x.format),
              std::byte{});
  Panel panel = first_panel();
  for (int64_t g = 0; g < panels.count; ++g) {
    panel = next_panel(panels, panel, rowwise ? 1 : block.rows);
    const Place place = place_of(panels, panel, args.form, block, args.layout);
    for (int64_t r = 0; r < panel.rows; ++r) {
      for (int64_t c = 0; c < panels.cols; ++c) {
        const int64_t outer = rowwise ? r : c, k = rowwise ? c : r;
        const e4m3 element = args.qdata.data[place.qdata + outer * place.qdata_stride + k];
        const e8m0 scale =
            scale_at(args.scale.data, place, args.form, block, args.layout, outer, k);
        const float value = to_float(element) * to_float(scale);
        const int64_t at = (panel.begin + r) * panels.cols + c;
        if (args.x.format == Format::kF32)
          static_cast<float*>(args.x.data)[at] = value;
        else
          static_cast<bf16*>(args.x.data)[at] = to_bf16(value);
      }
    }
  }
}

}  // namespace moxie::ref
