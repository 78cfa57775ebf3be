// grouped_mm that also adds up the quantization error of its operands (stats.h): of x and w in
// forward, of dy in backward. It is composed of other ops, so it works with every device, autograd
// and torch.compile.
#include <torch/library.h>

#include "moxie/torch/autograd/node.h"
#include "moxie/torch/autograd/operand_stats.h"
#include "moxie/torch/stats.h"

namespace moxie::ops {
namespace {

constexpr const char* kOp = "grouped_mm";

void check_stats(const Tensor& stats, const Tensor& x) {
  const Input input{kOp, "stats", stats};
  TORCH_CHECK_TYPE(stats.scalar_type() == at::kDouble, kOp, ": stats must be torch.float64, got ",
                   dtype_name(stats.scalar_type()));
  check_shape(input, {kNumStatsParts, kNumStats});
  check_device(input, x);
}

Tensor multiply(const Tensor& x, const Tensor& w, const Tensor& stats, const OptionalTensor& offs,
                std::string_view recipe, const OptionalTensor& bias,
                std::optional<at::ScalarType> dtype, OptionalTensors quantized_w,
                const OptionalTensor& main_grad) {
  return with_op(kOp, [&] {
    check_stats(stats, x);
    const Tensor y = ops::grouped_mm(
        x, w, grouped_mm_options(offs, recipe, bias, dtype, quantized_w, main_grad));
    add_once_(stats.narrow(0, 0, kForwardParts), stats_of_forward({x, x, w}, offs, recipe));
    if (y.requires_grad())
      y.register_hook([stats, offs, recipe = std::string(recipe)](const Tensor& dy) {
        const at::NoGradGuard no_grad;
        stats.narrow(0, kForwardParts, kNumStatsParts - kForwardParts)
            .add_(stats_of_gradient(dy, offs, recipe));
      });
    return y;
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(moxie, CompositeImplicitAutograd, m) {
  m.impl("grouped_mm.stats", TORCH_FN(multiply));
}

}  // namespace moxie::ops
