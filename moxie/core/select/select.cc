#include "moxie/core/select/select.h"

#include "moxie/core/base/check.h"
#include "moxie/core/base/dispatch.h"
#include "moxie/core/select/backends.h"

namespace moxie {
namespace {

constexpr const char* kOp = "select_experts";

void check_sizes(const Shape& logits, const Shape& ids) {
  MOXIE_CHECK(logits.dims == 2, kOp, ": logits must be [tokens, experts], got ", logits);
  MOXIE_CHECK(logits[1] >= 1 && logits[1] <= kMaxGroups, kOp, ": there must be 1 to ", kMaxGroups,
              " experts, got ", logits[1]);
  MOXIE_CHECK(ids.dims == 2 && ids[0] == logits[0], kOp, ": ids must be [", logits[0],
              ", top_k], got ", ids);
  MOXIE_CHECK(ids[1] >= 1 && ids[1] <= logits[1] && ids[1] <= kMaxTopK, kOp,
              ": k must be 1 to the ", logits[1], " experts and at most ", kMaxTopK, ", got ",
              ids[1]);
}

}  // namespace

void select(const SelectArgs& args, const Exec& exec) {
  check_sizes(args.logits.shape, args.ids.shape);
  const int64_t experts = args.logits.dim(1);
  if (args.bias) check_shape(kOp, "bias", args.bias->shape, {experts});
  check_shape(kOp, "weights", args.weights.shape, args.ids.shape);
  if (args.how_counts != Counts::kNotWanted)
    check_shape(kOp, "counts", args.counts.shape, {experts});
  dispatch(
      kOp, exec, [&] { ref::select(args); }, [&] { cpu::select(args, exec); },
      [&](auto stream) { cuda::select(args, stream); });
}

void select_backward(const SelectBackwardArgs& args, const Exec& exec) {
  check_sizes(args.logits.shape, args.ids.shape);
  check_shape(kOp, "dweights", args.dweights.shape, args.ids.shape);
  check_shape(kOp, "dlogits", args.dlogits.shape, args.logits.shape);
  const int64_t experts = args.logits.dim(1), slots = numel(args.ids.shape);
  for (int64_t i = 0; exec.backend != Backend::kCuda && i < slots; ++i)
    MOXIE_CHECK(args.ids.data[i] >= 0 && args.ids.data[i] < experts, kOp, ": ids must be 0 to ",
                experts - 1, ", got ", args.ids.data[i], " at slot ", i);
  dispatch(
      kOp, exec, [&] { ref::select_backward(args); }, [&] { cpu::select_backward(args, exec); },
      [&](auto stream) { cuda::select_backward(args, stream); });
}

}  // namespace moxie
