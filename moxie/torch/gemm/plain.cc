#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/masked_fill.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "moxie/torch/exec.h"
#include "moxie/torch/gemm/products.h"

namespace moxie::ops {

Tensor PassArgs::allocate() const {
  if (add_to) return *add_to;
  return at::empty(at::IntArrayRef(out.size.data(), static_cast<size_t>(out.dims)),
                   a.data.options().dtype(dtype));
}

namespace {

// A group's rows with rows of zeros behind them, which add nothing to a product along the rows.
Tensor with_zeros(const Tensor& rows, int64_t count) {
  if (rows.size(0) == count) return rows;
  const Tensor copy = at::empty({count, rows.size(1)}, rows.options());
  copy.narrow(0, 0, rows.size(0)).copy_(rows);
  copy.narrow(0, rows.size(0), count - rows.size(0)).zero_();
  return copy;
}

// One product per group.
Tensor multiply_cpu(const PassArgs& args) {
  const Tensor out = args.allocate();
  // f32 results come from f32 products; bf16 ones are summed in f32 by the product itself.
  const Tensor a = args.a.data.to(out.scalar_type()), b = args.b.data.to(out.scalar_type());
  const bool wgrad = args.pass == Pass::kWgrad;
  const OptionalTensor offs = dense(args.offs);
  const Panels panels =
      make_panels(name(args.pass), {args.num_rows, a.size(1)}, offs_view(offs), Backend::kCpu);
  Panel panel = first_panel();
  for (int64_t g = 0; g < panels.count; ++g) {
    panel = next_panel(panels, panel, 1);
    if (wgrad) {
      const int64_t depth = round_up(panel.rows, ragged_step(out.scalar_type()));
      const Tensor dy = with_zeros(a.narrow(0, panel.begin, panel.rows), depth);
      const Tensor x = with_zeros(b.narrow(0, panel.begin, panel.rows), depth);
      Tensor to = out.select(0, g);
      if (args.add_to)
        to.addmm_(dy.t(), x);
      else
        at::mm_out(to, dy.t(), x);
      continue;
    }
    if (panel.rows == 0) continue;
    const int64_t count = computed_rows(panel.rows, args.num_rows - panel.begin, out.scalar_type());
    const Tensor rows = a.narrow(0, panel.begin, count);
    Tensor to = out.narrow(0, panel.begin, count);
    const Tensor w = args.pass == Pass::kForward ? b.select(0, g).t() : b.select(0, g);
    if (args.bias) {
      const Tensor bias = args.bias->dim() == 2 ? args.bias->select(0, g) : *args.bias;
      at::addmm_out(to, bias.to(out.scalar_type()), rows, w);
    } else {
      at::mm_out(to, rows, w);
    }
  }
  const int64_t covered = panel.begin + panel.rows;
  if (!wgrad) out.narrow(0, covered, args.num_rows - covered).zero_();
  return out;
}

// torch's grouped product takes bf16 in and out, rows of whole 16 bytes, and fewer than 1024
// groups.
bool takes_grouped_mm(const PassArgs& args, const Tensor& a, const Tensor& b) {
  constexpr int64_t kAligned = 16 / sizeof(bf16);
  constexpr int64_t kMostGroups = 1023;
  const bool wgrad = args.pass == Pass::kWgrad;
  return args.offs && args.offs->size(0) <= kMostGroups && !args.add_to &&
         a.scalar_type() == at::kBFloat16 && args.dtype == at::kBFloat16 && a.numel() > 0 &&
         b.numel() > 0 && a.size(1) % kAligned == 0 && b.size(-1) % kAligned == 0 &&
         (wgrad || b.size(-2) % kAligned == 0);
}

// One group: torch's dense product.
Tensor multiply_dense(const PassArgs& args, const Tensor& a, const Tensor& b) {
  if (args.pass == Pass::kWgrad) return at::mm(a.t(), b).unsqueeze(0);
  const Tensor w = args.pass == Pass::kForward ? b.select(0, 0).t() : b.select(0, 0);
  if (!args.bias) return at::mm(a, w);
  const Tensor bias = args.bias->dim() == 2 ? args.bias->select(0, 0) : *args.bias;
  return at::addmm(bias.to(a.scalar_type()), a, w);
}

bool has_kernel(at::ScalarType dtype) { return dtype == at::kFloat || dtype == at::kBFloat16; }

// f64 and other dtypes of the identity recipe: every group's product with all rows, of which it
// keeps its own. Slow, but no kernel to maintain, and no wait for the group sizes.
Tensor multiply_masked(const PassArgs& args, const Tensor& a, const Tensor& b, const Tensor& offs) {
  const Tensor out = args.add_to ? *args.add_to : args.allocate().zero_();
  const Tensor rows = at::arange(args.num_rows, offs.options()).unsqueeze(1);
  Tensor begin = at::zeros({}, offs.options());
  for (int64_t g = 0; g < offs.size(0); ++g) {
    const Tensor end = at::maximum(begin, offs.select(0, g));  // as of any offs: never backwards
    const Tensor inside = rows.ge(begin).logical_and(rows.lt(end));
    begin = end;
    if (args.pass == Pass::kWgrad) {
      const Tensor dy = a.masked_fill(~inside, 0), x = b.masked_fill(~inside, 0);
      out.select(0, g).add_(at::mm(dy.t(), x));
      continue;
    }
    Tensor y = at::mm(a, args.pass == Pass::kForward ? b.select(0, g).t() : b.select(0, g));
    if (args.bias) y += args.bias->dim() == 2 ? args.bias->select(0, g) : *args.bias;
    out.copy_(at::where(inside, y, out));
  }
  return out;
}

Tensor multiply_cuda(const PassArgs& args) {
  const DeviceScope scope(args.a.data.device());
  const Tensor a = dense(args.a.data), b = dense(args.b.data);
  const OptionalTensor offs = dense(args.offs), bias = dense(args.bias);
  if (!offs && !args.add_to && a.scalar_type() == args.dtype) return multiply_dense(args, a, b);
  if (!has_kernel(a.scalar_type()) || !has_kernel(args.dtype)) {
    const Tensor end = at::full({1}, args.num_rows, a.options().dtype(at::kInt));
    return multiply_masked(args, a.to(args.dtype), b.to(args.dtype), offs.value_or(end));
  }
  std::optional<ConstFloatView> bias_view;
  if (bias) bias_view = const_float_view(*bias);
  if (takes_grouped_mm(args, a, b)) {
    // dy transposed times x is the order in which torch allows groups without rows.
    if (args.pass == Pass::kWgrad) return at::_grouped_mm(a.t(), b, offs);
    const Tensor out = at::_grouped_mm(a, args.pass == Pass::kForward ? b.mT() : b, offs);
    finish_rows({.offs = const_view<int32_t>(*offs), .bias = bias_view, .out = float_view(out)},
                scope.exec());
    return out;
  }
  const Tensor out = args.allocate();
  product({.pass = args.pass,
           .a = const_float_view(a),
           .b = const_float_view(b),
           .offs = offs_view(offs),
           .bias = bias_view,
           .out = float_view(out),
           .sum = args.sum()},
          scope.exec());
  return out;
}

}  // namespace

Tensor multiply_plain(const PassArgs& args) {
  return args.a.data.is_cpu() ? multiply_cpu(args) : multiply_cuda(args);
}

}  // namespace moxie::ops
