#include "moxie/core/row_scale/dequantize_row_scale.h"

#include <algorithm>
#include <array>

#include "moxie/core/base/dispatch.h"
#include "moxie/core/base/parallel.h"
#include "moxie/core/row_scale/backends.h"

namespace moxie {
namespace {

Panels check(const DequantizeRowScaleArgs& args, Backend backend) {
  constexpr const char* kOp = "dequantize_row_scale";
  const Panels panels = make_panels(kOp, args.x.shape, args.offs, backend);
  const auto expected = row_scale_shape<int64_t>(args.x.shape, num_groups(panels), args.form);
  check_shape(kOp, "qdata", args.qdata.shape, expected.qdata);
  check_shape(kOp, "scale", args.scale.shape, expected.scale);
  return panels;
}

// The values of the 256 codes, because decode_row() decodes by table.
std::array<float, 256> decode_table() {
  std::array<float, 256> table;
  for (int code = 0; code < 256; ++code) table[code] = to_float(e4m3{static_cast<uint8_t>(code)});
  return table;
}

void put(float* to, float value) { *to = value; }
void put(bf16* to, float value) { *to = to_bf16(value); }

// Decodes one row of x. Both ref and cpu use it; ref on one thread, cpu on all.
template <class T>
void decode_row(const DequantizeRowScaleArgs& args, const Panels& panels, const Panel& panel,
                int64_t row, T* out) {
  static const std::array<float, 256> kValue = decode_table();
  const int64_t cols = panels.cols;
  if (args.form == Form::kRowwise) {
    const e4m3* q = args.qdata.data + (panel.begin + row) * cols;
    const float scale = args.scale.data[panel.begin + row];
    for (int64_t c = 0; c < cols; ++c) put(out + c, kValue[q[c].bits] * scale);
    return;
  }
  const int64_t stride = args.qdata.dim(-1);
  const e4m3* q = panels.weights ? args.qdata.data + panel.index * cols * stride + row
                                 : args.qdata.data + panel.padded + row;
  const float* scale = args.scale.data + panel.index * cols;
  for (int64_t c = 0; c < cols; ++c) put(out + c, kValue[q[c * stride].bits] * scale[c]);
}

template <class T>
void decode_all(const DequantizeRowScaleArgs& args, const Panels& panels, const Exec& exec) {
  T* const x = static_cast<T*>(args.x.data);
  Panel panel = first_panel();
  for (int64_t g = 0; g < panels.count; ++g) {
    panel = next_panel(panels, panel, args.form == Form::kColwise ? kRowScaleAlignment : 1);
    parallel_for(exec, panel.rows, 64, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        decode_row(args, panels, panel, r, x + (panel.begin + r) * panels.cols);
    });
  }
  const int64_t covered = panel.begin + panel.rows;
  std::fill_n(x + covered * panels.cols, (panels.total_rows() - covered) * panels.cols, T{});
}

}  // namespace

void dequantize_row_scale(const DequantizeRowScaleArgs& args, const Exec& exec) {
  const Panels panels = check(args, exec.backend);
  const auto decode = [&](const Exec& where) {
    if (args.x.format == Format::kF32)
      decode_all<float>(args, panels, where);
    else
      decode_all<bf16>(args, panels, where);
  };
  dispatch(
      "dequantize_row_scale", exec, [&] { decode({.parallel = nullptr}); }, [&] { decode(exec); },
      [&](auto stream) { cuda::dequantize_row_scale(args, panels, stream); });
}

}  // namespace moxie
