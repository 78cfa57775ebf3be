// Decodes FP8 operands for a GEMM in high precision: the whole operand, or panel by panel on a CPU.
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include "moxie/core/gemm/decode.h"
#include "moxie/torch/exec.h"
#include "moxie/torch/gemm/multiply.h"
#include "moxie/torch/ops/dequantize.h"

namespace moxie::ops {
namespace {

// Decodes a whole operand, to the order it had before quantization (not transposed).
Tensor decode_whole(const PassArgs& args, const Quantized& operand, FormAndBlock as) {
  if (!operand.scale) return operand.data;
  // f32 results need f32 operands only on a CPU: on a GPU, bf16 GEMMs accumulate in f32.
  const bool wide = args.dtype == at::kFloat && operand.data.is_cpu();
  const bool stack = operand.data.dim() == 3, by_row = args.recipe().scaling == Scaling::kRow;
  const OptionalTensor offs = stack ? std::nullopt : args.offs;
  // Weight caches may hold scales as bytes, because inductor cannot write e8m0.
  const Tensor scale = by_row ? *operand.scale : operand.scale->view(at::kFloat8_e8m0fnu);
  return dequantize({.op = name(args.pass),
                     .form = as.form,
                     .qdata = operand.data,
                     .scale = scale,
                     .offs = offs,
                     .block = as.block,
                     .num_rows = stack ? operand.data.size(2) : args.num_rows,
                     .dtype = wide ? at::kFloat : at::kBFloat16,
                     .layout = args.layout_of(operand),
                     .scaling = args.recipe().scaling});
}

// How many rows of an operand are decoded at a time. 1024 rows of 1024 to 8192 columns are 2 to 16
// MB in bf16, about what caches hold. Each decoded row is multiplied with up to 1024 others, so
// decoding is about one operation in a thousand.
constexpr int64_t kPanelRows = 1024;

// An operand that is decoded one panel at a time.
class Panelled {
 public:
  Panelled(const Quantized& operand, FormAndBlock as, at::ScalarType dtype)
      : qdata_(dense(operand.data)),
        scale_(dense(*operand.scale)),
        operand_(gemm_operand({qdata_, scale_}, as, ScaleLayout::kPlain)),
        dtype_(dtype) {}

  int64_t outer() const { return qdata_.size(-2); }
  int64_t k() const { return qdata_.size(-1); }
  int64_t k_block() const { return operand_.k_block; }

  struct Range {
    int64_t matrix, first_outer, outers, first_k, ks;
    int64_t live_ks;  // of ks, those in the group; the rest is padding, which may hold anything
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

// Multiplies panels: out[i, j] is the dot product of row first_a + i of a and row j of b over
// [first_k, first_k + ks), for i < rows and every j. Rows of out from `rows` on may be overwritten.
struct PanelProduct {
  int64_t matrix, first_a, rows, first_k, ks, live_ks;
  OptionalTensor bias;  // [rows of b], added to each row of out
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
  Panelled a(args.a, form_of_a(args.recipe(), args.pass), args.dtype);
  Panelled b(args.b, form_of_b(args.recipe(), args.pass), args.dtype);
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
                       // Rounding reaches at most into the padding, which fills a block along k.
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

Tensor multiply_decoded(const PassArgs& args) {
  const auto is_plain = [&](const Quantized& operand) {
    return operand.scale && args.layout_of(operand) == ScaleLayout::kPlain;
  };
  if (args.a.data.is_cpu() && args.recipe().scaling == Scaling::kBlock && is_plain(args.a) &&
      is_plain(args.b))
    return multiply_by_panels(args);
  PassArgs decoded = args;
  decoded.a = {decode_whole(args, args.a, form_of_a(args.recipe(), args.pass)), {}};
  decoded.b = {decode_whole(args, args.b, form_of_b(args.recipe(), args.pass)), {}};
  return multiply_plain(decoded);
}

}  // namespace moxie::ops
