// The backends of quantize_row_scale and dequantize_row_scale; arguments arrive checked. Private to
// this folder.
#pragma once

#include "moxie/core/row_scale/dequantize_row_scale.h"

namespace moxie {

namespace ref {
void quantize_row_scale(const RowScaleArgs& args, const Panels& panels);
}
namespace cpu {
void quantize_row_scale(const RowScaleArgs& args, const Panels& panels, const Exec& exec);
}
namespace cuda {
void quantize_row_scale(const RowScaleArgs& args, const Panels& panels, void* stream);
void dequantize_row_scale(const DequantizeRowScaleArgs& args, const Panels& panels, void* stream);
}  // namespace cuda

// The index of a panel's first element in qdata_t, and the stride between rows of qdata_t.
struct RowScalePlace {
  int64_t qdata, stride;
};

constexpr RowScalePlace colwise_place(const Panels& p, const Panel& panel) {
  if (p.weights) return {panel.begin * p.cols, p.rows};
  const int64_t buffer =
      (p.rows + p.count * (kRowScaleAlignment - 1)) / kRowScaleAlignment * kRowScaleAlignment;
  return {panel.padded, buffer};
}

}  // namespace moxie
