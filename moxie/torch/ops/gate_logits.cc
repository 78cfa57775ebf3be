// What a router ranks experts by: x weight^T in f32, whatever the dtype of both.
#include <ATen/ops/linear.h>

#include "moxie/torch/exec.h"
#include "moxie/torch/ops/register.h"
#include "moxie/torch/view.h"

namespace moxie::ops {
namespace {

constexpr const char* kOp = "gate_logits";

// Double is for tests that take derivatives.
void check_values(const Input& input) {
  if (input.tensor.scalar_type() != at::kDouble) check_float(input);
  TORCH_CHECK_VALUE(input.tensor.dim() == 2, input.op, ": ", input.name, " must be a matrix, got ",
                    input.tensor.dim(), " dims");
}

Tensor gate_logits_op(const Tensor& x, const Tensor& weight) {
  return with_op(kOp, [&] {
    check_values({kOp, "x", x});
    check_values({kOp, "weight", weight});
    check_shape({kOp, "x", x}, {x.sym_size(0), weight.sym_size(1)});
    check_device({kOp, "weight", weight}, x);
    const auto dtype = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const SymShape shape{x.sym_size(0), weight.sym_size(0)};
    if (x.is_meta()) return allocate({{"logits", dtype, shape}}, x)[0];
    const DeviceScope scope(x.device());
    const at::NoGradGuard no_grad;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    // The order of a CPU's sums depends on where a row is among the others. In f64 that is too
    // little to be seen in f32, so a token is routed alike wherever it stands.
    const auto wide = x.is_cpu() ? at::kDouble : dtype;
    // A GPU's product has other sums for operands that begin elsewhere.
    return at::linear(aligned(x.to(wide)), aligned(weight.to(wide))).to(dtype);
  });
}

void register_ops(torch::Library& m) { m.impl("gate_logits", TORCH_FN(gate_logits_op)); }

}  // namespace

MOXIE_REGISTER_OPS(register_ops)

}  // namespace moxie::ops
