#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/masked_fill.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "moxie/core/groups/groups.h"
#include "moxie/torch/exec.h"
#include "moxie/torch/gemm/multiply.h"

namespace moxie::ops {

Tensor PassArgs::allocate() const {
  if (add_to) return *add_to;
  return at::empty(at::IntArrayRef(out.size.data(), static_cast<size_t>(out.dims)),
                   a.data.options().dtype(dtype));
}

namespace {

// Pads a group's rows to `count` rows with zeros, which add nothing to a contraction over rows.
Tensor with_zeros(const Tensor& rows, int64_t count) {
  if (rows.size(0) == count) return rows;
  const Tensor copy = at::empty({count, rows.size(1)}, rows.options());
  copy.narrow(0, 0, rows.size(0)).copy_(rows);
  copy.narrow(0, rows.size(0), count - rows.size(0)).zero_();
  return copy;
}

// Multiplies on a CPU, one GEMM per group.
Tensor multiply_cpu(const PassArgs& args) {
  const Tensor out = args.allocate();
  // Operands are converted to the result's dtype: f32 results need f32 operands, and a GEMM in bf16
  // accumulates in f32 anyway.
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

// Multiplies a single group by torch's dense GEMM.
Tensor multiply_dense(const PassArgs& args, const Tensor& a, const Tensor& b) {
  if (args.pass == Pass::kWgrad) return at::mm(a.t(), b).unsqueeze(0);
  const Tensor w = args.pass == Pass::kForward ? b.select(0, 0).t() : b.select(0, 0);
  if (!args.bias) return at::mm(a, w);
  const Tensor bias = args.bias->dim() == 2 ? args.bias->select(0, 0) : *args.bias;
  return at::addmm(aligned(bias.to(a.scalar_type())), a, w);
}

// For f64 and other dtypes that the recipe `identity` allows on a GPU: multiplies all rows with
// every group's matrix and masks the rows of other groups. This is slow, but it needs no kernel and
// does not wait for the group sizes.
Tensor multiply_masked(const PassArgs& args, const Tensor& a, const Tensor& b, const Tensor& offs) {
  const Tensor out = args.add_to ? *args.add_to : args.allocate().zero_();
  const Tensor rows = at::arange(args.num_rows, offs.options()).unsqueeze(1);
  Tensor begin = at::zeros({}, offs.options());
  for (int64_t g = 0; g < offs.size(0); ++g) {
    const Tensor end = at::maximum(begin, offs.select(0, g));  // on a GPU offs may decrease
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

// Multiplies by Moxie's own simple kernel (core/gemm/product.h).
Tensor multiply_product(const PassArgs& args, const Tensor& a, const Tensor& b,
                        const OptionalTensor& offs, const Exec& exec) {
  const OptionalTensor bias = dense(args.bias);
  const Tensor out = args.allocate();
  product({.pass = args.pass,
           .a = const_float_view(a),
           .b = const_float_view(b),
           .offs = offs_view(offs),
           .bias = bias ? std::optional(const_float_view(*bias)) : std::nullopt,
           .out = float_view(out),
           .sum = args.sum()},
          exec);
  return out;
}

Tensor multiply_torch_grouped(const PassArgs& args, const Tensor& a, const Tensor& b,
                              const Tensor& offs, const Exec& exec) {
  const Tensor ends = ends_for_torch(args, offs, /*alignment=*/1, exec);
  // torch allows empty groups only with the transposed operand first, as in dy^T x.
  if (args.pass == Pass::kWgrad) return at::_grouped_mm(a.t(), b, ends);
  const Tensor out = at::_grouped_mm(a, args.pass == Pass::kForward ? b.mT() : b, ends);
  finish_by_torch(args, ends, out, exec);
  return out;
}

}  // namespace

Tensor ends_for_torch(const PassArgs& args, const Tensor& offs, int64_t alignment,
                      const Exec& exec) {
  const Tensor ends = at::empty_like(offs);
  padded_offs({.offs = const_view<int32_t>(offs),
               .rows = args.num_rows,
               .alignment = alignment,
               .padded = view<int32_t>(ends)},
              exec);
  return ends;
}

void finish_by_torch(const PassArgs& args, const Tensor& offs, const Tensor& out,
                     const Exec& exec) {
  const OptionalTensor bias = dense(args.bias);
  finish_rows({.offs = const_view<int32_t>(offs),
               .bias = bias ? std::optional(const_float_view(*bias)) : std::nullopt,
               .out = float_view(out)},
              exec);
}

Tensor multiply_plain(const PassArgs& args) {
  if (args.a.data.is_cpu()) return multiply_cpu(args);
  const DeviceScope scope(args.a.data.device());
  const Tensor a = aligned(args.a.data), b = aligned(args.b.data);
  const OptionalTensor offs = dense(args.offs);
  switch (args.plan.kernel) {
    case Kernel::kMm: return multiply_dense(args, a, b);
    case Kernel::kTorchGrouped: return multiply_torch_grouped(args, a, b, *offs, scope.exec());
    case Kernel::kMasked: {
      const Tensor end = at::full({1}, args.num_rows, a.options().dtype(at::kInt));
      return multiply_masked(args, a.to(args.dtype), b.to(args.dtype), offs.value_or(end));
    }
    default: return multiply_product(args, a, b, offs, scope.exec());
  }
}

Tensor multiply(const PassArgs& args) {
  if (args.num_rows == 0) {  // no rows: some kernels reject empty operands
    if (args.offs && args.a.data.is_cpu()) {
      const Tensor ends = dense(*args.offs);
      moxie::check_offs(name(args.pass), const_view<int32_t>(ends), 0, "rows", Backend::kCpu);
    }
    if (args.add_to) return *args.add_to;
    return args.allocate().zero_();
  }
  switch (args.plan.kernel) {
    case Kernel::kSm90: return multiply_sm90(args);
    case Kernel::kSm90Rows: return multiply_sm90_rows(args);
    case Kernel::kSm100: return multiply_sm100(args);
    default: return args.a.scale || args.b.scale ? multiply_decoded(args) : multiply_plain(args);
  }
}

}  // namespace moxie::ops
