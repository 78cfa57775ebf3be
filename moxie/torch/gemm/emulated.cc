#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include "moxie/core/gemm/decode.h"
#include "moxie/core/row_scale/dequantize_row_scale.h"
#include "moxie/torch/exec.h"
#include "moxie/torch/gemm/products.h"
#include "moxie/torch/ops.h"

namespace moxie::ops {
namespace {

// ---- the whole operand, in its natural order
// -----------------------------------------------------

Tensor decode_rows(const PassArgs& args, const Quantized& operand, Form form,
                   at::ScalarType dtype) {
  const DeviceScope scope(operand.data.device());
  const Tensor qdata = dense(operand.data), scale = dense(*operand.scale);
  const bool colwise = form == Form::kColwise, stack = qdata.dim() == 3;
  std::vector<int64_t> sizes = qdata.sizes().vec();
  if (colwise && stack) sizes = {sizes[0], sizes[2], sizes[1]};
  if (colwise && !stack) sizes = {args.num_rows, sizes[0]};
  const Tensor x = at::empty(sizes, qdata.options().dtype(dtype));
  const OptionalTensor offs = stack ? std::nullopt : dense(args.offs);
  dequantize_row_scale({.form = form,
                        .qdata = const_view<e4m3>(qdata),
                        .scale = const_view<float>(scale),
                        .offs = offs_view(offs),
                        .x = float_view(x)},
                       scope.exec());
  return x;
}

Tensor decode_whole(const PassArgs& args, const Quantized& operand, OperandForm as) {
  if (!operand.scale) return operand.data;
  // A GPU's product sums bf16 in f32, so f32 results need no wider operands there.
  const bool wide = args.dtype == at::kFloat && operand.data.is_cpu();
  const auto dtype = wide ? at::kFloat : at::kBFloat16;
  if (args.recipe.scaling == Scaling::kRow) return decode_rows(args, operand, as.form, dtype);
  const Tensor scale = operand.scale->view(at::kFloat8_e8m0fnu);  // a weight cache has bytes
  const std::string block = name(as.block);
  const bool stack = operand.data.dim() == 3;
  const DequantizeOptions options{.offs = stack ? std::nullopt : args.offs,
                                  .block = block,
                                  .dtype = dtype,
                                  .scale_layout = name(layout_in(args, operand, as))};
  if (as.form == Form::kRowwise) return dequantize_rowwise(operand.data, scale, options);
  return dequantize_colwise(operand.data, scale, stack ? operand.data.size(2) : args.num_rows,
                            options);
}

// ---- a CPU: panel by panel
// -----------------------------------------------------------------------

// Rows of either operand that are decoded at a time. 1024 rows of 1024 to 8192 are 2 to 16 MB in
// bf16, what a core's caches hold or nearly; each is multiplied with about as many, so decoding is
// one operation in about a thousand.
constexpr int64_t kPanelRows = 1024;

// An operand of which one panel at a time is decoded.
class Panelled {
 public:
  Panelled(const Quantized& operand, OperandForm as, at::ScalarType dtype)
      : qdata_(dense(operand.data)),
        scale_(dense(*operand.scale)),
        operand_(gemm_operand({qdata_, scale_}, as)),
        dtype_(dtype) {}

  int64_t outer() const { return qdata_.size(-2); }
  int64_t k() const { return qdata_.size(-1); }
  int64_t k_block() const { return operand_.k_block; }

  struct Range {
    int64_t matrix, first_outer, outers, first_k, ks;
    int64_t live_ks;  // the rest of them is padding, whatever it holds
  };
  Tensor decode(const Range& range, const Exec& exec) {
    const int64_t count = range.outers * range.ks;
    if (!buffer_.defined() || buffer_.numel() < count)
      buffer_ = at::empty({count}, qdata_.options().dtype(dtype_));
    const Tensor out = buffer_.narrow(0, 0, count).view({range.outers, range.ks});
    moxie::decode({.operand = operand_,
                   .matrix = range.matrix,
                   .first_outer = range.first_outer,
                   .first_k = range.first_k,
                   .out = float_view(out)},
                  exec);
    if (range.live_ks < range.ks) out.narrow(1, range.live_ks, range.ks - range.live_ks).zero_();
    return out;
  }

 private:
  Tensor qdata_, scale_, buffer_;
  GemmOperand operand_;
  at::ScalarType dtype_;
};

// out[i, j] = a[i] . b[j] over [first_k, first_k + ks): i counts rows from first_a, j all of b.
// Rows of out behind those may be overwritten.
struct PanelProduct {
  int64_t matrix, first_a, rows, first_k, ks, live_ks;
  OptionalTensor bias;  // [all of b]
  bool add;
};

void multiply_panels(const PanelProduct& what, Panelled& a, Panelled& b, const Tensor& out,
                     const Exec& exec) {
  const at::ScalarType dtype = out.scalar_type();
  for (int64_t i = 0; i < what.rows; i += kPanelRows) {
    const int64_t rows = computed_rows(min(kPanelRows, what.rows - i), out.size(0) - i, dtype);
    const Tensor left =
        a.decode({0, what.first_a + i, rows, what.first_k, what.ks, what.live_ks}, exec);
    for (int64_t j = 0; j < b.outer(); j += kPanelRows) {
      const int64_t cols = min(kPanelRows, b.outer() - j);
      const Tensor right =
          b.decode({what.matrix, j, cols, what.first_k, what.ks, what.live_ks}, exec).t();
      Tensor to = out.narrow(0, i, rows).narrow(1, j, cols);
      if (what.add)
        to.addmm_(left, right);
      else if (what.bias)
        at::addmm_out(to, what.bias->narrow(0, j, cols), left, right);
      else
        at::mm_out(to, left, right);
    }
  }
}

Tensor multiply_by_panels(const PassArgs& args) {
  const DeviceScope scope(args.a.data.device());
  const Tensor out = args.allocate();
  const bool wgrad = args.pass == Pass::kWgrad;
  Panelled a(args.a, form_of_a(args.recipe, args.pass), args.dtype);
  Panelled b(args.b, form_of_b(args.recipe, args.pass), args.dtype);
  const OptionalTensor offs = dense(args.offs);
  const Panels panels =
      make_panels(name(args.pass), {args.num_rows, a.k()}, offs_view(offs), Backend::kCpu);
  Panel panel = first_panel();
  for (int64_t g = 0; g < panels.count; ++g) {
    panel = next_panel(panels, panel, wgrad ? a.k_block() : 1);
    if (wgrad) {
      multiply_panels({.matrix = 0,
                       .first_a = 0,
                       .rows = a.outer(),
                       .first_k = panel.padded,
                       // No further than the padding, which fills a block along k.
                       .ks = round_up(panel.rows, ragged_step(args.dtype)),
                       .live_ks = panel.rows,
                       .bias = {},
                       .add = args.add_to.has_value()},
                      a, b, out.select(0, g), scope.exec());
      continue;
    }
    PanelProduct what{.matrix = g,
                      .first_a = panel.begin,
                      .rows = panel.rows,
                      .first_k = 0,
                      .ks = a.k(),
                      .live_ks = a.k(),
                      .bias = {},
                      .add = false};
    if (args.bias)
      what.bias = (args.bias->dim() == 2 ? args.bias->select(0, g) : *args.bias).to(args.dtype);
    multiply_panels(what, a, b, out.narrow(0, panel.begin, args.num_rows - panel.begin),
                    scope.exec());
  }
  const int64_t covered = panel.begin + panel.rows;
  if (!wgrad) out.narrow(0, covered, args.num_rows - covered).zero_();
  return out;
}

}  // namespace

Tensor multiply_emulated(const PassArgs& args) {
  const OperandForm as_a = form_of_a(args.recipe, args.pass),
                    as_b = form_of_b(args.recipe, args.pass);
  const bool by_panels = args.a.data.is_cpu() && args.recipe.scaling == Scaling::kBlock &&
                         args.a.scale && args.b.scale &&
                         layout_in(args, args.a, as_a) == ScaleLayout::kPlain &&
                         layout_in(args, args.b, as_b) == ScaleLayout::kPlain;
  if (by_panels) return multiply_by_panels(args);
  PassArgs decoded = args;
  decoded.a = {decode_whole(args, args.a, as_a), {}};
  decoded.b = {decode_whole(args, args.b, as_b), {}};
  return multiply_plain(decoded);
}

}  // namespace moxie::ops
