// Converts at::Tensor to the core's View, and checks what the core cannot: dtype, device,
// contiguity. Messages name the op that the user called. A wrong dtype is a TypeError in Python,
// anything else a ValueError.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "moxie/core/base/check.h"
#include "moxie/core/layout/check_args.h"
#include "moxie/core/layout/shape.h"
#include "moxie/torch/recipe.h"

namespace moxie::ops {

using at::Tensor;
using OptionalTensor = std::optional<at::Tensor>;
using OptionalTensors = std::optional<at::ArrayRef<at::Tensor>>;
using SymShape = BasicShape<c10::SymInt>;

// An operand of a pass: quantized if it has a scale, else in high precision and not transposed.
struct Quantized {
  Tensor data;
  OptionalTensor scale;
};

// How tokens [T, D] become rows [R, D], as route() returns it. Without slot_of and row_of, they are
// rows already.
struct Permutation {
  OptionalTensor slot_of = std::nullopt, row_of = std::nullopt;
  int64_t top_k = 1;
};

// ---- arguments -------------------------------------------------------------------------------

// An argument of an op, with the names for error messages.
struct Input {
  const char* op;
  const char* name;
  const Tensor& tensor;
};

std::string dtype_name(at::ScalarType dtype);  // as Python writes it

void check_float(const Input& input);  // bf16 or f32
void check_e4m3(const Input& input);   // qdata
void check_e8m0(const Input& input);   // scale
// A scale must be e8m0 or its bytes (as a weight cache under inductor holds them), or f32 for
// Scaling::kRow.
void check_scale(const Input& scale, Scaling scaling);
void check_int32(const Input& input);  // [G]: offs, starts
void check_matrix_or_stack(const Input& input);
void check_device(const Input& input, const Tensor& like);
void check_shape(const Input& input, const SymShape& expected);
// The layout in which an op reads scales, and the name of the argument that says so. The shape
// alone cannot tell: without offs and padding, plain and swizzled scales of 1x32 or 32x1 have the
// same shape.
struct LayoutArg {
  const char* name;
  ScaleLayout layout;
};
struct ScaleOf {
  SymShape x;  // the shape of what is quantized
  const OptionalTensor& offs;
  Form form;
  Block block;
};
void check_scale_shape(const Input& scale, const LayoutArg& said, const ScaleOf& of);

// Checks dtype, shape and device of offs. The core checks their values.
void check_offs(const char* op, const OptionalTensor& offs, const Tensor& x);
// The part of the core's check_operand_block() that needs no sizes, which are symbolic here.
void check_block(const char* op, Form form, Block block, const OptionalTensor& offs);

// Compares sizes. While torch.compile traces, this makes a guard, or a run-time assertion for a
// size that is not known.
inline bool same(const c10::SymInt& a, const c10::SymInt& b) {
  const auto x = a.maybe_as_int(), y = b.maybe_as_int();
  return x && y ? *x == *y : a.sym_eq(b).expect_true(__FILE__, __LINE__);
}

SymShape sym_shape(const Tensor& tensor);  // of up to three dims
// The core's operand_shape(). Sizes that are known, as in eager mode, are computed as plain
// integers: a third of the instructions.
OperandShape<c10::SymInt> operand_shape(const SymShape& x,
                                        const std::optional<c10::SymInt>& num_groups, Form form,
                                        Block block, ScaleLayout layout);
std::optional<c10::SymInt> num_groups(const OptionalTensor& offs);
Form parse_form(std::string_view text, std::string_view op);
at::ScalarType high_precision(std::optional<at::ScalarType> dtype, const char* op);

// ---- results ---------------------------------------------------------------------------------

// One tensor that an op returns.
struct Result {
  const char* name;
  at::ScalarType dtype;
  SymShape shape;
};
using Results = std::vector<Result>;

std::vector<Tensor> allocate(const Results& results, const Tensor& like);
// Checks the tensors that an `out` overload is given: they must be as allocate() would make them,
// and must share no memory with each other or with inputs.
void check_out(const char* op, const Results& results, const std::vector<Tensor>& out,
               std::initializer_list<OptionalTensor> inputs);
// Increments autograd's version counters of tensors that the core has written.
void mark_written(const std::vector<Tensor>& out);

// ---- views -----------------------------------------------------------------------------------

// Returns the tensor, copied if it is not contiguous. FP8 is copied as bytes, which every device
// can do.
Tensor dense(const Tensor& tensor);
OptionalTensor dense(const OptionalTensor& tensor);
// As dense(), but also copies a tensor that is not aligned to `bytes`: TMA and torch's kernels load
// 16 bytes at a time.
Tensor aligned(const Tensor& tensor, size_t bytes = 16);
bool is_aligned(const Tensor& tensor, size_t bytes = 16);

Shape shape_of(const Tensor& tensor);

// Throws if the memory of a tensor has been freed, as FSDP2 does with weights that it will gather
// again.
void check_memory(const Tensor& tensor);

// Views of tensors, which must be dense and have the right dtype.
template <class T>
View<const T> const_view(const Tensor& tensor) {
  check_memory(tensor);
  return {static_cast<const T*>(tensor.const_data_ptr()), shape_of(tensor)};
}
template <class T>
View<T> view(const Tensor& tensor) {
  check_memory(tensor);
  return {static_cast<T*>(tensor.mutable_data_ptr()), shape_of(tensor)};
}
OptionalOffs offs_view(const OptionalTensor& offs);
ConstFloatView const_float_view(const Tensor& tensor);
FloatView float_view(const Tensor& tensor);

// ---- errors ----------------------------------------------------------------------------------

[[noreturn]] void rethrow(const char* op, const Error& error);        // a ValueError in Python
[[noreturn]] void rethrow(const char* op, const DeviceError& error);  // a RuntimeError

// Runs body and rethrows the core's exceptions as torch's, with this op's name in the message.
template <class Body>
auto with_op(const char* op, Body&& body) {
  try {
    return body();
  } catch (const Error& error) {
    rethrow(op, error);
  } catch (const DeviceError& error) {
    rethrow(op, error);
  }
}

}  // namespace moxie::ops
