// The sum of the rows of each group, in f32: the gradient of a bias.
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sum.h>

#include "moxie/core/gemm/product.h"
#include "moxie/torch/exec.h"
#include "moxie/torch/ops/register.h"
#include "moxie/torch/view.h"

namespace moxie::ops {
namespace {

constexpr const char* kOp = "sum_groups";

Tensor sum_on_cpu(const Tensor& x, const OptionalTensor& offs, const Tensor& out) {
  const Panels panels = make_panels(kOp, shape_of(x), offs_view(offs), Backend::kCpu);
  Panel panel = first_panel();
  for (int64_t g = 0; g < panels.count; ++g) {
    panel = next_panel(panels, panel, 1);
    Tensor to = out.select(0, g);
    at::sum_out(to, x.narrow(0, panel.begin, panel.rows), at::IntArrayRef{0}, false,
                out.scalar_type());
  }
  return out;
}

Tensor sum_groups(const Tensor& x, const OptionalTensor& offs) {
  return with_op(kOp, [&] {
    // f64 is accepted for gradcheck.
    if (x.scalar_type() != at::kDouble) check_float({kOp, "x", x});
    TORCH_CHECK_VALUE(x.dim() == 2, kOp, ": x must be [rows, cols], got ", x.dim(), " dims");
    check_offs(kOp, offs, x);
    const auto dtype = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const Tensor out =
        allocate({{"sums", dtype, {num_groups(offs).value_or(1), x.sym_size(1)}}}, x)[0];
    if (x.is_meta()) return out;
    const DeviceScope scope(x.device());
    const OptionalTensor ends = dense(offs);
    if (x.is_cpu()) return sum_on_cpu(x, ends, out);
    if (dtype == at::kDouble) {  // gradcheck has no need of speed, and the kernels have no f64
      const auto host = [](const Tensor& tensor) { return tensor.to(at::kCPU); };
      const OptionalTensor host_ends = ends ? OptionalTensor(host(*ends)) : std::nullopt;
      return out.copy_(sum_on_cpu(host(x), host_ends, host(out)));
    }
    // Computes the sum of rows as a wgrad whose other operand is a column of ones: x^T 1.
    const Tensor rows = dense(x), ones = at::ones({x.size(0), 1}, x.options());
    product({.pass = Pass::kWgrad,
             .a = const_float_view(rows),
             .b = const_float_view(ones),
             .offs = offs_view(ends),
             .out = float_view(out.unsqueeze(-1))},
            scope.exec());
    return out;
  });
}

void register_ops(torch::Library& m) { m.impl("sum_groups", TORCH_FN(sum_groups)); }

}  // namespace

MOXIE_REGISTER_OPS(register_ops)

}  // namespace moxie::ops
