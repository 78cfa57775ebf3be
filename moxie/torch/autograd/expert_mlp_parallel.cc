// expert_mlp.parallel: expert_mlp with the experts split over the ranks of a process group. Here a
// call is checked and ranks agree about it; expert_mlp_group.h is the way of its tokens.
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "moxie/torch/autograd/expert_mlp_group.h"
#include "moxie/torch/autograd/expert_mlp_over_ranks.h"

namespace moxie::ops {
namespace {

using mlp::Autograd;
using mlp::Call;
using mlp::kOp;
using mlp::Needs;
using mlp::ParallelArgs;
using mlp::Wire;

template <Autograd kAutograd>
Tensor call_parallel(const ParallelArgs& args) {
  const Group group(args.group, kOp);
  ExpertMlpOptions options = args.options;
  const Recipe recipe = parse_recipe(options.recipe, kOp);
  const Wire wire = mlp::parse_wire(args.wire, recipe);
  check_parallel(args, group.size());
  const mlp::Args of_mlp{args.x, args.w13, args.w2, options};
  Needs needs = mlp::needs_of<kAutograd>(of_mlp, args.weights);
  const int64_t experts = args.w13.size(0), top_k = args.weights.size(1);
  options.offs = at::zeros({experts}, args.offs.options());
  const Call without_rows = checked_call(args, options, 0, needs);
  const Tensor offs = ends_in_order(args);
  const Tensor slot_of = dense(args.slot_of), row_of = dense(args.row_of);
  Agreed agreed;
  mlp::XForWire x;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    CountsExchange counts(group, kOp, {offs, slot_of, row_of, top_k, experts},
                          {.autograd = needs.any(),
                           .dx = needs.x,
                           .dweights = needs.weights,
                           .db2 = needs.b2,
                           .signature = signature_of(args, recipe, wire)});
    // While this runs, the host waits for the counts and queues what needs them.
    x = {mlp::for_wire(without_rows.plan.up, wire, Role::kX, args.x.to(args.rows_dtype())),
         pairs_of_x(counts.row_in_message(), {args.weights, slot_of})};
    agreed = counts.wait();
  }
  const auto path = mlp::group_path({group,
                                     wire,
                                     agreed,
                                     {offs, {slot_of, row_of, top_k}, args.weights},
                                     args.x.scalar_type(),
                                     options.b2.has_value()},
                                    x);
  x = {};  // it is sent
  needs = path->all_needs(needs);
  options.offs = path->offs();
  const Call call = call_of_received(args, options, agreed.places.in.num_pairs(), needs, wire);
  return mlp::run(kAutograd, of_mlp, call, *path, needs);
}

template <Autograd kAutograd>
Tensor expert_mlp_parallel_kernel(
    const Tensor& x, const Tensor& w13, const Tensor& w2, const Tensor& weights, const Tensor& offs,
    const Tensor& slot_of, const Tensor& row_of, std::string_view group, std::string_view recipe,
    std::string_view wire, OptionalTensors quantized_w13, OptionalTensors quantized_w2,
    const OptionalTensor& main_grad13, const OptionalTensor& main_grad2, std::string_view keep,
    std::optional<at::ScalarType> x_dtype, std::string_view activation, const OptionalTensor& b13,
    const OptionalTensor& b2, std::string_view w13_layout) {
  const ExpertMlpOptions options = mlp::options_of(
      /*offs=*/{}, recipe, quantized_w13, quantized_w2, main_grad13, main_grad2, /*slot_of=*/{},
      /*row_of=*/{}, /*top_k=*/1, /*weights=*/{}, keep, x_dtype, activation, b13, b2, w13_layout);
  const ParallelArgs args{x,    w13,    w2, weights, offs, slot_of, row_of, std::string(group),
                          wire, options};
  return with_op(kOp, [&] { return call_parallel<kAutograd>(args); });
}

}  // namespace

TORCH_LIBRARY_IMPL(moxie, Autograd, m) {
  m.impl("expert_mlp.parallel", TORCH_FN(expert_mlp_parallel_kernel<Autograd::kYes>));
}
TORCH_LIBRARY_IMPL(moxie, CompositeExplicitAutograd, m) {
  m.impl("expert_mlp.parallel", TORCH_FN(expert_mlp_parallel_kernel<Autograd::kNo>));
}

}  // namespace moxie::ops
