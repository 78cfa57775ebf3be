#include "moxie/core/base/parallel.h"
#include "moxie/core/format/values.h"
#include "moxie/core/gemm/backends.h"

namespace moxie::ref {
namespace {

// Rounds to f32, then to the format of the result.
void put(const FloatView& out, int64_t i, double value) {
  put_value(out, i, static_cast<float>(value));
}

void wgrad(const ProductArgs& args, int64_t g, int64_t begin, int64_t end) {
  const int64_t n_end = args.out.dim(1), k_end = args.out.dim(2);
  for (int64_t n = 0; n < n_end; ++n)
    for (int64_t k = 0; k < k_end; ++k) {
      const int64_t i = (g * n_end + n) * k_end + k;
      double sum = 0;
      for (int64_t r = begin; r < end; ++r)
        sum += double{value_at(args.a, r * n_end + n)} * value_at(args.b, r * k_end + k);
      if (args.sum == Sum::kAdd) sum += static_cast<const float*>(args.out.data)[i];
      put(args.out, i, sum);
    }
}

void rows(const ProductArgs& args, int64_t g, int64_t begin, int64_t end) {
  const bool forward = args.pass == Pass::kForward;
  const int64_t cols = args.out.dim(1), contract = args.a.dim(1);
  for (int64_t r = begin; r < end; ++r)
    for (int64_t c = 0; c < cols; ++c) {
      double sum = 0;
      for (int64_t i = 0; i < contract; ++i)
        sum += double{value_at(args.a, r * contract + i)} *
               value_at(args.b,
                        forward ? (g * cols + c) * contract + i : (g * contract + i) * cols + c);
      if (args.bias) sum += value_at(*args.bias, args.bias->shape.dims == 2 ? g * cols + c : c);
      put(args.out, r * cols + c, sum);
    }
}

}  // namespace

void product(const ProductArgs& args, const Panels& panels) {
  const KernelScope scope;
  Panel panel = first_panel();
  for (int64_t g = 0; g < panels.count; ++g) {
    panel = next_panel(panels, panel, 1);
    const auto pass = args.pass == Pass::kWgrad ? wgrad : rows;
    pass(args, g, panel.begin, panel.begin + panel.rows);
  }
  if (args.pass == Pass::kWgrad) return;
  const int64_t cols = args.out.dim(1);
  for (int64_t i = (panel.begin + panel.rows) * cols; i < panels.rows * cols; ++i)
    put(args.out, i, 0);
}

void finish_rows(const FinishRowsArgs& args, const Panels& panels) {
  const KernelScope scope;
  const int64_t cols = panels.cols;
  const ConstFloatView out{args.out.data, args.out.format, args.out.shape};
  Panel panel = first_panel();
  for (int64_t g = 0; g < panels.count; ++g) {
    panel = next_panel(panels, panel, 1);
    if (!args.bias) continue;
    for (int64_t i = panel.begin * cols; i < (panel.begin + panel.rows) * cols; ++i) {
      const int64_t c = i % cols;
      put(args.out, i,
          double{value_at(out, i)} +
              value_at(*args.bias, args.bias->shape.dims == 2 ? g * cols + c : c));
    }
  }
  for (int64_t i = (panel.begin + panel.rows) * cols; i < panels.rows * cols; ++i)
    put(args.out, i, 0);
}

}  // namespace moxie::ref
