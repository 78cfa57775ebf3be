#include "moxie/core/permute/permute.h"

#include "moxie/core/base/check.h"
#include "moxie/core/base/dispatch.h"
#include "moxie/core/permute/backends.h"

namespace moxie {
namespace {

void check_matrix(const char* op, const char* argument, const Shape& shape) {
  MOXIE_CHECK(shape.dims == 2, op, ": ", argument, " must be a matrix, got ", shape);
}

void check_formats(const char* op, Format a, Format b) {
  MOXIE_CHECK(a == b, op, ": input and result must have the same format, got ", name(a), " and ",
              name(b));
}

// top_k: slots per token.
int64_t slots_per_token(const char* op, int64_t slots, int64_t tokens) {
  MOXIE_CHECK(tokens == 0 ? slots == 0 : slots % tokens == 0, op,
              ": slots must be a multiple of the ", tokens, " tokens, got ", slots);
  return tokens == 0 ? 1 : slots / tokens;
}

// Checks indices only if the host can read them; on a GPU, kernels clamp them instead.
void check_indices(const char* op, const char* argument, const View<const int32_t>& indices,
                   int64_t end, Backend backend) {
  if (backend == Backend::kCuda) return;
  for (int64_t i = 0; i < indices.dim(0); ++i)
    MOXIE_CHECK(indices.data[i] >= 0 && indices.data[i] < end, op, ": ", argument, " must be 0 to ",
                end - 1, ", got ", indices.data[i], " at ", i);
}

}  // namespace

void permute(const PermuteArgs& args, const Exec& exec) {
  constexpr const char* kOp = "permute";
  check_matrix(kOp, "x", args.x.shape);
  const int64_t rows = args.slot_of.dim(0);
  MOXIE_CHECK(args.top_k >= 1, kOp, ": top_k must be 1 or more, got ", args.top_k);
  check_shape(kOp, "slot_of", args.slot_of.shape, {args.x.dim(0) * args.top_k});
  check_shape(kOp, "rows", args.rows.shape, {rows, args.x.dim(1)});
  check_formats(kOp, args.x.format, args.rows.format);
  if (args.weights) check_shape(kOp, "weights", args.weights->shape, {args.x.dim(0), args.top_k});
  check_indices(kOp, "slot_of", args.slot_of, rows, exec.backend);
  dispatch(
      kOp, exec, [&] { ref::permute(args); }, [&] { cpu::permute(args, exec); },
      [&](auto stream) { cuda::permute(args, stream); });
}

void permute_quantize(const PermuteQuantizeArgs& args, const Exec& exec) {
  constexpr const char* kOp = "permute_quantize";
  check_matrix(kOp, "x", args.x.shape);
  const int64_t rows = args.slot_of.dim(0);
  MOXIE_CHECK(args.top_k >= 1, kOp, ": top_k must be 1 or more, got ", args.top_k);
  check_shape(kOp, "slot_of", args.slot_of.shape, {args.x.dim(0) * args.top_k});
  check_indices(kOp, "slot_of", args.slot_of, rows, exec.backend);
  if (args.row_of) check_shape(kOp, "row_of", args.row_of->shape, {rows});
  const Panels panels = check_forms(kOp, {rows, args.x.dim(1)}, args.forms, exec.backend);
  dispatch(
      kOp, exec, [&] { ref::permute_quantize(args); },
      [&] { cpu::permute_quantize(args, panels, exec); },
      [&](auto stream) { cuda::permute_quantize(args, panels, stream); });
}

void unpermute(const UnpermuteArgs& args, const Exec& exec) {
  constexpr const char* kOp = "unpermute";
  check_matrix(kOp, "rows", args.rows.shape);
  check_matrix(kOp, "x", args.x.shape);
  const int64_t tokens = args.x.dim(0), slots = args.row_of.dim(0);
  const int64_t k = slots_per_token(kOp, slots, tokens);
  check_shape(kOp, "rows", args.rows.shape, {slots, args.x.dim(1)});
  check_formats(kOp, args.rows.format, args.x.format);
  if (args.weights && tokens > 0) check_shape(kOp, "weights", args.weights->shape, {tokens, k});
  check_indices(kOp, "row_of", args.row_of, slots, exec.backend);
  dispatch(
      kOp, exec, [&] { ref::unpermute(args); }, [&] { cpu::unpermute(args, exec); },
      [&](auto stream) { cuda::unpermute(args, stream); });
}

void unpermute_weights(const UnpermuteWeightsArgs& args, const Exec& exec) {
  constexpr const char* kOp = "unpermute_weights";
  check_matrix(kOp, "dout", args.dout.shape);
  check_matrix(kOp, "rows", args.rows.shape);
  const int64_t tokens = args.dout.dim(0), slots = args.row_of.dim(0);
  const int64_t k = slots_per_token(kOp, slots, tokens);
  check_shape(kOp, "rows", args.rows.shape, {slots, args.dout.dim(1)});
  if (tokens > 0) check_shape(kOp, "dweights", args.dweights.shape, {tokens, k});
  check_formats(kOp, args.dout.format, args.rows.format);
  check_indices(kOp, "row_of", args.row_of, slots, exec.backend);
  dispatch(
      kOp, exec, [&] { ref::unpermute_weights(args); }, [&] { cpu::unpermute_weights(args, exec); },
      [&](auto stream) { cuda::unpermute_weights(args, stream); });
}

}  // namespace moxie
