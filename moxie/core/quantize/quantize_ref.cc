// The spec as loops, never optimised: every other backend must equal it byte for byte.
#include <algorithm>
#include <bit>

#include "moxie/core/base/parallel.h"
#include "moxie/core/quantize/backends.h"

namespace moxie::ref {
namespace {

struct Matrix {  // x seen as [total rows, cols]
  ConstFloatView x;
  int64_t cols;

  float at(int64_t row, int64_t col) const {
    const int64_t i = row * cols + col;
    if (x.format == Format::kF32) return static_cast<const float*>(x.data)[i];
    return to_float(static_cast<const bf16*>(x.data)[i]);
  }
};

// The largest magnitude of a block. Magnitudes are ordered like their bits; NaN is the largest.
float amax_of(const Matrix& x, int64_t row, int64_t rows, int64_t col, int64_t cols) {
  uint32_t most = 0;
  for (int64_t r = row; r < row + rows; ++r)
    for (int64_t c = col; c < col + cols; ++c)
      most = std::max(most, std::bit_cast<uint32_t>(x.at(r, c)) & 0x7fffffff);
  return std::bit_cast<float>(most);
}

void quantize_panel(const Matrix& x, const Panel& panel, const Place& place, Form form,
                    const QuantizedOut& out, ScaleRule rule) {
  const Block block = out.block;
  for (int64_t r = 0; r < panel.rows; r += block.rows) {
    for (int64_t c = 0; c < x.cols; c += block.cols) {
      const int64_t rows = std::min<int64_t>(block.rows, panel.rows - r);
      const int64_t cols = std::min<int64_t>(block.cols, x.cols - c);
      const e8m0 scale = scale_of(amax_of(x, panel.begin + r, rows, c, cols), rule);
      const int64_t i = r / block.rows, j = c / block.cols;
      const bool rowwise = form == Form::kRowwise;
      put_scale(out.scale.data, place, form, block, out.layout, rowwise ? i : j, rowwise ? j : i,
                scale);
      for (int64_t dr = 0; dr < rows; ++dr) {
        for (int64_t dc = 0; dc < cols; ++dc) {
          const int64_t outer = rowwise ? r + dr : c + dc, k = rowwise ? c + dc : r + dr;
          out.qdata.data[place.qdata + outer * place.qdata_stride + k] =
              to_e4m3(x.at(panel.begin + r + dr, c + dc) * inverse(scale));
        }
      }
    }
  }
}

void quantize_form(const QuantizeArgs& args, const Panels& panels, Form form,
                   const QuantizedOut& out) {
  std::fill_n(out.qdata.data, numel(out.qdata.shape), e4m3{});
  std::fill_n(out.scale.data, numel(out.scale.shape), e8m0{});
  const Matrix x{args.x, panels.cols};
  Panel panel = first_panel();
  for (int64_t g = 0; g < panels.count; ++g) {
    panel = next_panel(panels, panel, form == Form::kColwise ? out.block.rows : 1);
    const Place place = place_of(panels, panel, form, out.block, out.layout);
    quantize_panel(x, panel, place, form, out, args.rule);
  }
}

}  // namespace

void quantize(const QuantizeArgs& args, const Panels& panels) {
  const KernelScope scope;
  if (args.rowwise) quantize_form(args, panels, Form::kRowwise, *args.rowwise);
  if (args.colwise) quantize_form(args, panels, Form::kColwise, *args.colwise);
}

}  // namespace moxie::ref
