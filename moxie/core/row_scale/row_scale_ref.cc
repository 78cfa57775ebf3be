#include <algorithm>
#include <bit>

#include "moxie/core/base/parallel.h"
#include "moxie/core/row_scale/backends.h"

namespace moxie::ref {
namespace {

float at(const ConstFloatView& x, int64_t i) {
  if (x.format == Format::kF32) return static_cast<const float*>(x.data)[i];
  return to_float(static_cast<const bf16*>(x.data)[i]);
}

// Quantizes one line of elements that share a scale: a row, or a column of a group.
RowScale quantize_line(const ConstFloatView& x, int64_t begin, int64_t stride, int64_t count,
                       e4m3* out) {
  uint32_t most = 0;
  for (int64_t i = 0; i < count; ++i)
    most = std::max(most, std::bit_cast<uint32_t>(at(x, begin + i * stride)) & 0x7fffffff);
  const RowScale scale = row_scale_of(std::bit_cast<float>(most));
  for (int64_t i = 0; i < count; ++i) out[i] = to_e4m3(at(x, begin + i * stride) * scale.encode);
  return scale;
}

}  // namespace

void quantize_row_scale(const RowScaleArgs& args, const Panels& panels) {
  const KernelScope scope;
  for (const auto& out : {args.rowwise, args.colwise}) {
    if (!out) continue;
    std::fill_n(out->qdata.data, numel(out->qdata.shape), e4m3{});
    std::fill_n(out->scale.data, numel(out->scale.shape), 0.f);
  }
  Panel panel = first_panel();
  for (int64_t g = 0; g < panels.count; ++g) {
    panel = next_panel(panels, panel, kRowScaleAlignment);
    if (args.rowwise) {
      for (int64_t r = panel.begin; r < panel.begin + panel.rows; ++r)
        args.rowwise->scale.data[r] = quantize_line(args.x, r * panels.cols, 1, panels.cols,
                                                    args.rowwise->qdata.data + r * panels.cols)
                                          .decode;
    }
    if (args.colwise && panel.rows > 0) {
      const RowScalePlace place = colwise_place(panels, panel);
      for (int64_t c = 0; c < panels.cols; ++c)
        args.colwise->scale.data[g * panels.cols + c] =
            quantize_line(args.x, panel.begin * panels.cols + c, panels.cols, panel.rows,
                          args.colwise->qdata.data + place.qdata + c * place.stride)
                .decode;
    }
  }
}

}  // namespace moxie::ref
