// The spec as loops: products of decoded elements are exact in f64 and summed in f64 in the order
// of k; the sum is rounded to f32 once, then to the format of the result.
#include <cmath>

#include "moxie/core/base/parallel.h"
#include "moxie/core/format/values.h"
#include "moxie/core/gemm/backends.h"

namespace moxie::ref {
namespace {

// Element [outer, k] of matrix g: e4m3 times a power of two, always exact in f64.
double at(const GemmOperand& operand, int64_t g, int64_t outer, int64_t k) {
  const Shape& q = operand.qdata.shape;
  const int64_t row = g * q.dim(-2) + outer;
  const Shape& s = operand.scale.shape;
  const int64_t i = outer / operand.outer_block, j = k / operand.k_block;
  const int64_t rows = ceil_div<int64_t>(q.dim(-2), operand.outer_block);
  const int64_t in_matrix =
      operand.layout == ScaleLayout::kPlain ? i * s.dim(-1) + j : quad_index(i, j, rows * kQuad);
  const e8m0 scale = operand.scale.data[g * s.dim(-2) * s.dim(-1) + in_matrix];
  const float value = to_float(operand.qdata.data[row * q.dim(-1) + k]);
  if (scale.code == kE8m0Nan) return std::nan("");
  return std::ldexp(static_cast<double>(value), scale.code - 127);
}

// Rounds to f32, then to the format of the result.
void put(const FloatView& out, int64_t i, double value) {
  put_value(out, i, static_cast<float>(value));
}

}  // namespace

void grouped_mm(const GroupedMmArgs& args, const Panels& panels) {
  const KernelScope scope;
  const int64_t n_end = args.out.dim(1), k_end = panels.cols;
  Panel panel = first_panel();
  for (int64_t g = 0; g < panels.count; ++g) {
    panel = next_panel(panels, panel, 1);
    for (int64_t row = panel.begin; row < panel.begin + panel.rows; ++row)
      for (int64_t n = 0; n < n_end; ++n) {
        double sum = 0;
        for (int64_t k = 0; k < k_end; ++k) sum += at(args.a, 0, row, k) * at(args.b, g, n, k);
        if (args.bias) sum += value_at(*args.bias, args.bias->shape.dims == 2 ? g * n_end + n : n);
        put(args.out, row * n_end + n, sum);
      }
  }
  for (int64_t row = panel.begin + panel.rows; row < panels.rows; ++row)
    for (int64_t n = 0; n < n_end; ++n) put(args.out, row * n_end + n, 0);
}

void grouped_wgrad(const GroupedWgradArgs& args, const Panels& panels) {
  const KernelScope scope;
  const int64_t n_end = args.out.dim(1), k_end = args.out.dim(2);
  Panel panel = first_panel();
  for (int64_t g = 0; g < panels.count; ++g) {
    panel = next_panel(panels, panel, args.a.k_block);
    for (int64_t n = 0; n < n_end; ++n)
      for (int64_t k = 0; k < k_end; ++k) {
        const int64_t i = (g * n_end + n) * k_end + k;
        double sum = 0;
        for (int64_t r = panel.padded; r < panel.padded + panel.rows; ++r)
          sum += at(args.a, 0, n, r) * at(args.b, 0, k, r);
        if (args.sum == Sum::kAdd) sum += static_cast<const float*>(args.out.data)[i];
        put(args.out, i, sum);
      }
  }
}

void decode(const DecodeArgs& args) {
  const KernelScope scope;
  const int64_t ks = args.out.dim(1);
  for (int64_t i = 0; i < args.out.dim(0); ++i)
    for (int64_t j = 0; j < ks; ++j)
      put(args.out, i * ks + j,
          at(args.operand, args.matrix, args.first_outer + i, args.first_k + j));
}

}  // namespace moxie::ref
