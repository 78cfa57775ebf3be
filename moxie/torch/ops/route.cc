#include "moxie/core/route/route.h"

#include <ATen/ops/empty.h>

#include "moxie/torch/exec.h"
#include "moxie/torch/ops/register.h"
#include "moxie/torch/view.h"

namespace moxie::ops {
namespace {

void check_matrix(const Input& input, const char* shape) {
  TORCH_CHECK_VALUE(input.tensor.dim() == 2, input.op, ": ", input.name, " must be ", shape,
                    ", got ", input.tensor.dim(), " dims");
}

Tensor top_k_op(const Tensor& scores, int64_t k) {
  constexpr const char* kOp = "top_k";
  return with_op(kOp, [&] {
    const bool is_double = scores.scalar_type() == at::kDouble;
    if (!is_double) check_float({kOp, "scores", scores});
    check_matrix({kOp, "scores", scores}, "[tokens, experts]");
    const c10::SymInt experts = scores.sym_size(1);
    TORCH_CHECK_VALUE(k >= 1 && k <= kMaxTopK && experts.sym_ge(k).expect_true(__FILE__, __LINE__),
                      kOp, ": k must be 1 to the ", experts, " experts and at most ", kMaxTopK,
                      ", got ", k);
    const Tensor ids = allocate({{"ids", at::kInt, {scores.sym_size(0), k}}}, scores)[0];
    if (scores.is_meta()) return ids;
    const DeviceScope scope(scores.device());
    const Tensor wide = dense(scores.to(at::kFloat));
    top_k({.scores = const_view<float>(wide), .ids = view<int32_t>(ids)}, scope.exec());
    return ids;
  });
}

std::tuple<Tensor, Tensor, Tensor> route_op(const Tensor& ids, int64_t num_experts) {
  constexpr const char* kOp = "route";
  return with_op(kOp, [&] {
    TORCH_CHECK_TYPE(ids.scalar_type() == at::kInt, kOp, ": ids must be torch.int32, got ",
                     ids.scalar_type());
    check_matrix({kOp, "ids", ids}, "[tokens, top_k]");
    TORCH_CHECK_VALUE(num_experts >= 1 && num_experts <= kMaxGroups, kOp,
                      ": num_experts must be 1 to ", kMaxGroups, ", got ", num_experts);
    const c10::SymInt slots = ids.sym_size(0) * ids.sym_size(1);
    const auto out = allocate({{"offs", at::kInt, {c10::SymInt(num_experts)}},
                               {"slot_of", at::kInt, {slots}},
                               {"row_of", at::kInt, {slots}}},
                              ids);
    if (!ids.is_meta()) {
      const DeviceScope scope(ids.device());
      const Tensor from = dense(ids);
      const int64_t size = ids.is_cpu() ? 0 : route_workspace<int64_t>(ids.numel(), num_experts);
      const Tensor workspace = at::empty({size}, ids.options());
      route({.ids = const_view<int32_t>(from),
             .offs = view<int32_t>(out[0]),
             .slot_of = view<int32_t>(out[1]),
             .row_of = view<int32_t>(out[2]),
             .workspace = view<int32_t>(workspace)},
            scope.exec());
    }
    return std::tuple(out[0], out[1], out[2]);
  });
}

void register_ops(torch::Library& m) {
  m.impl("top_k", TORCH_FN(top_k_op));
  m.impl("route", TORCH_FN(route_op));
}

}  // namespace

MOXIE_REGISTER_OPS(register_ops)

}  // namespace moxie::ops
