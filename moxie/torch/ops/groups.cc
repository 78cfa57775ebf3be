#include "moxie/core/groups/groups.h"

#include <limits>

#include "moxie/torch/exec.h"
#include "moxie/torch/ops/register.h"
#include "moxie/torch/view.h"

namespace moxie::ops {
namespace {

void check_rows(const Input& input) {
  TORCH_CHECK_VALUE(input.tensor.dim() == 2, input.op, ": ", input.name,
                    " must be [rows, cols], got ", input.tensor.dim(), " dims");
}

void check_alignment(const char* op, int64_t alignment) {
  TORCH_CHECK_VALUE(alignment >= 1 && alignment <= kMaxAlignment, op, ": alignment must be 1 to ",
                    kMaxAlignment, ", got ", alignment);
}

// Checks a size before anything of that size is allocated.
void check_count(const char* op, const char* what, const c10::SymInt& rows) {
  TORCH_CHECK_VALUE(
      rows.sym_ge(0).expect_true(__FILE__, __LINE__) &&
          rows.sym_le(std::numeric_limits<int32_t>::max()).expect_true(__FILE__, __LINE__),
      op, ": ", what, " must not be negative and fit the int32 of offs, got ", rows);
}

// Passes rows to the core as bytes, so that one kernel moves rows of every dtype.
Shape byte_shape(const Tensor& tensor) {
  return {tensor.size(0), tensor.size(1) * tensor.element_size()};
}
View<const std::byte> const_bytes(const Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), byte_shape(tensor)};
}
View<std::byte> bytes(const Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()), byte_shape(tensor)};
}

// ---- pad_groups ------------------------------------------------------------------------------

constexpr const char* kPadOp = "pad_groups";

Results pad_results(const Tensor& x, const Tensor& offs, int64_t alignment) {
  check_rows({kPadOp, "x", x});
  check_offs(kPadOp, offs, x);
  check_alignment(kPadOp, alignment);
  const c10::SymInt groups = offs.sym_size(0);
  const auto rows = pad_groups_rows(x.sym_size(0), groups, alignment);
  check_count(kPadOp, "padded rows", rows);
  return {{"padded", x.scalar_type(), {rows, x.sym_size(1)}},
          {"starts", at::kInt, {groups}},
          {"ends", at::kInt, {groups}}};
}

void pad(const Tensor& x, const Tensor& offs, int64_t alignment, const std::vector<Tensor>& out) {
  if (x.is_meta()) return;
  const DeviceScope scope(x.device());
  const Tensor dense_x = dense(x), dense_offs = dense(offs);
  moxie::pad_groups({.x = const_bytes(dense_x),
                     .offs = const_view<int32_t>(dense_offs),
                     .alignment = alignment,
                     .padded = bytes(out[0]),
                     .starts = view<int32_t>(out[1]),
                     .ends = view<int32_t>(out[2])},
                    scope.exec());
}

std::tuple<Tensor, Tensor, Tensor> pad_groups(const Tensor& x, const Tensor& offs,
                                              int64_t alignment) {
  return with_op(kPadOp, [&] {
    const auto out = allocate(pad_results(x, offs, alignment), x);
    pad(x, offs, alignment, out);
    return std::tuple(out[0], out[1], out[2]);
  });
}

void pad_groups_out(const Tensor& x, const Tensor& offs, int64_t alignment, const Tensor& padded,
                    const Tensor& starts, const Tensor& ends) {
  with_op(kPadOp, [&] {
    const std::vector<Tensor> out = {padded, starts, ends};
    check_out(kPadOp, pad_results(x, offs, alignment), out, {x, offs});
    pad(x, offs, alignment, out);
    mark_written(out);
  });
}

// ---- unpad_groups ----------------------------------------------------------------------------

constexpr const char* kUnpadOp = "unpad_groups";

Results unpad_results(const Tensor& padded, const Tensor& offs, const Tensor& starts,
                      const c10::SymInt& num_rows) {
  check_rows({kUnpadOp, "padded", padded});
  check_offs(kUnpadOp, offs, padded);
  check_int32({kUnpadOp, "starts", starts});
  check_device({kUnpadOp, "starts", starts}, padded);
  check_shape({kUnpadOp, "starts", starts}, {offs.sym_size(0)});
  check_count(kUnpadOp, "num_rows", num_rows);
  return {{"x", padded.scalar_type(), {num_rows, padded.sym_size(1)}}};
}

void unpad(const Tensor& padded, const Tensor& offs, const Tensor& starts, const Tensor& x) {
  if (padded.is_meta()) return;
  const DeviceScope scope(padded.device());
  const Tensor dense_padded = dense(padded), dense_offs = dense(offs), dense_starts = dense(starts);
  moxie::unpad_groups({.padded = const_bytes(dense_padded),
                       .offs = const_view<int32_t>(dense_offs),
                       .starts = const_view<int32_t>(dense_starts),
                       .x = bytes(x)},
                      scope.exec());
}

Tensor unpad_groups(const Tensor& padded, const Tensor& offs, const Tensor& starts,
                    c10::SymInt num_rows) {
  return with_op(kUnpadOp, [&] {
    const Tensor x = allocate(unpad_results(padded, offs, starts, num_rows), padded)[0];
    unpad(padded, offs, starts, x);
    return x;
  });
}

void unpad_groups_out(const Tensor& padded, const Tensor& offs, const Tensor& starts,
                      c10::SymInt num_rows, const Tensor& x) {
  with_op(kUnpadOp, [&] {
    check_out(kUnpadOp, unpad_results(padded, offs, starts, num_rows), {x}, {padded, offs, starts});
    unpad(padded, offs, starts, x);
    mark_written({x});
  });
}

// ---- padded_offs -----------------------------------------------------------------------------

Tensor padded_offs(const Tensor& offs, int64_t alignment) {
  constexpr const char* kOp = "padded_offs";
  return with_op(kOp, [&] {
    check_int32({kOp, "offs", offs});
    check_alignment(kOp, alignment);
    const Tensor out = allocate({{"padded", at::kInt, {offs.sym_size(0)}}}, offs)[0];
    if (offs.is_meta()) return out;
    const DeviceScope scope(offs.device());
    const Tensor dense_offs = dense(offs);
    moxie::padded_offs({.offs = const_view<int32_t>(dense_offs),
                        .alignment = alignment,
                        .padded = view<int32_t>(out)},
                       scope.exec());
    return out;
  });
}

void register_ops(torch::Library& m) {
  m.impl("pad_groups", TORCH_FN(pad_groups));
  m.impl("pad_groups.out", TORCH_FN(pad_groups_out));
  m.impl("unpad_groups", TORCH_FN(unpad_groups));
  m.impl("unpad_groups.out", TORCH_FN(unpad_groups_out));
  m.impl("padded_offs", TORCH_FN(padded_offs));
}

}  // namespace

MOXIE_REGISTER_OPS(register_ops)

}  // namespace moxie::ops
