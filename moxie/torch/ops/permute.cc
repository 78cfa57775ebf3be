#include "moxie/core/permute/permute.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/div.h>

#include "moxie/torch/exec.h"
#include "moxie/torch/ops/register.h"
#include "moxie/torch/view.h"

namespace moxie::ops {
namespace {

// f64 is accepted for gradcheck and computed with torch's own ops.
bool is_double(const Tensor& tensor) { return tensor.scalar_type() == at::kDouble; }

void check_values(const Input& input) {
  if (!is_double(input.tensor)) check_float(input);
  TORCH_CHECK_VALUE(input.tensor.dim() == 2, input.op, ": ", input.name, " must be a matrix, got ",
                    input.tensor.dim(), " dims");
}

void check_index(const Input& input, const c10::SymInt& count, const Tensor& like) {
  TORCH_CHECK_TYPE(input.tensor.scalar_type() == at::kInt, input.op, ": ", input.name,
                   " must be torch.int32, got ", input.tensor.scalar_type());
  check_shape(input, {count});
  check_device(input, like);
}

void check_weights(const Input& input, const SymShape& shape, const Tensor& like) {
  const auto dtype = is_double(like) ? at::kDouble : at::kFloat;
  TORCH_CHECK_TYPE(input.tensor.scalar_type() == dtype, input.op, ": ", input.name, " must be ",
                   dtype, ", got ", input.tensor.scalar_type());
  check_shape(input, shape);
  check_device(input, like);
}

std::optional<View<const float>> weights_view(const OptionalTensor& weights) {
  return weights ? std::optional(const_view<float>(*weights)) : std::nullopt;
}

Tensor permute_op(const Tensor& x, const Tensor& slot_of, const Tensor& row_of, int64_t top_k,
                  const OptionalTensor& weights) {
  constexpr const char* kOp = "permute";
  return with_op(kOp, [&] {
    check_values({kOp, "x", x});
    TORCH_CHECK_VALUE(top_k >= 1, kOp, ": top_k must be 1 or more, got ", top_k);
    const c10::SymInt rows = x.sym_size(0) * top_k;
    check_index({kOp, "slot_of", slot_of}, rows, x);
    check_index({kOp, "row_of", row_of}, rows, x);
    if (weights) check_weights({kOp, "weights", *weights}, {x.sym_size(0), top_k}, x);
    const Tensor out = allocate({{"rows", x.scalar_type(), {rows, x.sym_size(1)}}}, x)[0];
    if (x.is_meta()) return out;
    const DeviceScope scope(x.device());
    if (is_double(x)) {
      const Tensor taken = x.index_select(0, at::div(slot_of, top_k, "floor"));
      return weights ? taken * weights->flatten().index_select(0, slot_of).unsqueeze(1) : taken;
    }
    const Tensor from = dense(x), slots = dense(slot_of);
    const OptionalTensor factors = dense(weights);
    permute({.x = const_float_view(from),
             .slot_of = const_view<int32_t>(slots),
             .top_k = top_k,
             .weights = weights_view(factors),
             .rows = float_view(out)},
            scope.exec());
    return out;
  });
}

Tensor unpermute_op(const Tensor& rows, const Tensor& slot_of, const Tensor& row_of,
                    c10::SymInt num_tokens, const OptionalTensor& weights) {
  constexpr const char* kOp = "unpermute";
  return with_op(kOp, [&] {
    check_values({kOp, "rows", rows});
    const c10::SymInt slots = rows.sym_size(0);
    check_index({kOp, "slot_of", slot_of}, slots, rows);
    check_index({kOp, "row_of", row_of}, slots, rows);
    TORCH_CHECK_VALUE(num_tokens.sym_ge(0).expect_true(__FILE__, __LINE__), kOp,
                      ": num_tokens must not be negative, got ", num_tokens);
    if (weights) {
      TORCH_CHECK_VALUE(weights->dim() == 2, kOp, ": weights must be [tokens, top_k], got ",
                        weights->dim(), " dims");
      check_weights({kOp, "weights", *weights}, {num_tokens, weights->sym_size(1)}, rows);
      TORCH_CHECK_VALUE(
          (num_tokens * weights->sym_size(1)).sym_eq(slots).expect_true(__FILE__, __LINE__), kOp,
          ": weights must have one for each of the ", slots, " rows, got ", weights->sym_sizes());
    }
    const Tensor out =
        allocate({{"x", rows.scalar_type(), {num_tokens, rows.sym_size(1)}}}, rows)[0];
    if (rows.is_meta()) return out;
    const DeviceScope scope(rows.device());
    if (is_double(rows)) {
      const int64_t tokens = num_tokens.expect_int();
      if (tokens == 0) return out;
      const Tensor by_slot =
          rows.index_select(0, row_of).view({tokens, rows.size(0) / tokens, rows.size(1)});
      return (weights ? by_slot * weights->unsqueeze(-1) : by_slot).sum(1);
    }
    const Tensor from = dense(rows), index = dense(row_of);
    const OptionalTensor factors = dense(weights);
    unpermute({.rows = const_float_view(from),
               .row_of = const_view<int32_t>(index),
               .weights = weights_view(factors),
               .x = float_view(out)},
              scope.exec());
    return out;
  });
}

Tensor unpermute_weights_op(const Tensor& dout, const Tensor& rows, const Tensor& row_of,
                            c10::SymInt top_k) {
  constexpr const char* kOp = "unpermute_weights";
  return with_op(kOp, [&] {
    check_values({kOp, "dout", dout});
    check_values({kOp, "rows", rows});
    TORCH_CHECK_TYPE(dout.scalar_type() == rows.scalar_type(), kOp, ": rows must be ",
                     dout.scalar_type(), " as dout, got ", rows.scalar_type());
    check_shape({kOp, "rows", rows}, {dout.sym_size(0) * top_k, dout.sym_size(1)});
    check_index({kOp, "row_of", row_of}, rows.sym_size(0), dout);
    const auto dtype = is_double(dout) ? at::kDouble : at::kFloat;
    const Tensor out = allocate({{"dweights", dtype, {dout.sym_size(0), top_k}}}, dout)[0];
    if (dout.is_meta()) return out;
    const DeviceScope scope(dout.device());
    if (is_double(dout)) {
      const Tensor by_slot =
          rows.index_select(0, row_of).view({dout.size(0), out.size(1), dout.size(1)});
      return (by_slot * dout.unsqueeze(1)).sum(-1);
    }
    const Tensor grad = dense(dout), from = dense(rows), index = dense(row_of);
    unpermute_weights({.dout = const_float_view(grad),
                       .rows = const_float_view(from),
                       .row_of = const_view<int32_t>(index),
                       .dweights = view<float>(out)},
                      scope.exec());
    return out;
  });
}

void register_ops(torch::Library& m) {
  m.impl("permute", TORCH_FN(permute_op));
  m.impl("unpermute", TORCH_FN(unpermute_op));
  m.impl("unpermute_weights", TORCH_FN(unpermute_weights_op));
}

}  // namespace

MOXIE_REGISTER_OPS(register_ops)

}  // namespace moxie::ops
