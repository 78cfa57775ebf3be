// at::Tensor -> View, and the checks that the core cannot make: dtype, device, contiguity. Messages
// name the op that the user called. A wrong dtype is a TypeError in Python, anything else a
// ValueError.
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
#include "moxie/torch/recipe.h"

namespace moxie::ops {

using at::Tensor;
using OptionalTensor = std::optional<at::Tensor>;
using OptionalTensors = std::optional<at::ArrayRef<at::Tensor>>;
using SymShape = BasicShape<c10::SymInt>;

// An operand of a pass. Without a scale it is in high precision and in its natural order.
struct Quantized {
  Tensor data;
  OptionalTensor scale;
};

// How tokens [T, D] become rows [R, D] (the result of route). Absent: they are rows already.
struct Permutation {
  OptionalTensor slot_of = std::nullopt, row_of = std::nullopt;
  int64_t top_k = 1;
};

// ---- arguments -------------------------------------------------------------------------------

// An argument with its names for messages.
struct Input {
  const char* op;
  const char* name;
  const Tensor& tensor;
};

std::string dtype_name(at::ScalarType dtype);  // as Python writes it

void check_float(const Input& input);  // bf16 or f32
void check_e4m3(const Input& input);   // qdata
void check_e8m0(const Input& input);   // scale
// e8m0, its bytes (in a weight cache under inductor), or f32 for Scaling::kRow.
void check_scale(const Input& scale, Scaling scaling);
void check_int32(const Input& input);  // [G]: offs, starts
void check_matrix_or_stack(const Input& input);
void check_device(const Input& input, const Tensor& like);
void check_shape(const Input& input, const SymShape& expected);
// The layout of scales that an op reads, and the argument that names it. The shape does not always
// tell: without offs and padding, plain and swizzled scales of 1x32 or 32x1 have the same shape.
struct LayoutArg {
  const char* name;
  ScaleLayout layout;
};
struct ScaleOf {
  SymShape x;  // what is quantized
  const OptionalTensor& offs;
  Form form;
  Block block;
};
void check_scale_shape(const Input& scale, const LayoutArg& said, const ScaleOf& of);

// Checks dtype, shape and device of offs. The core checks their values.
void check_offs(const char* op, const OptionalTensor& offs, const Tensor& x);
// The part of check_operand_block() that does not need a shape, for symbolic sizes.
void check_block(const char* op, Form form, Block block, const OptionalTensor& offs);

SymShape sym_shape(const Tensor& tensor);  // of up to three dims
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
// Checks the tensors of an `out` overload: they must be as allocate() would make them, and must not
// share memory.
void check_out(const char* op, const Results& results, const std::vector<Tensor>& out,
               std::initializer_list<OptionalTensor> inputs);
// Tells autograd's version counter that the core has written these tensors.
void mark_written(const std::vector<Tensor>& out);

// ---- views -----------------------------------------------------------------------------------

// Returns a contiguous tensor, copied if needed. FP8 is copied as bytes, which works on every
// device.
Tensor dense(const Tensor& tensor);
OptionalTensor dense(const OptionalTensor& tensor);
// The same, aligned to `bytes`: TMA and torch's kernels load 16 at a time.
Tensor aligned(const Tensor& tensor, size_t bytes = 16);
bool is_aligned(const Tensor& tensor, size_t bytes = 16);

Shape shape_of(const Tensor& tensor);

// Views of dense tensors; the dtype must have been checked.
template <class T>
View<const T> const_view(const Tensor& tensor) {
  return {static_cast<const T*>(tensor.const_data_ptr()), shape_of(tensor)};
}
template <class T>
View<T> view(const Tensor& tensor) {
  return {static_cast<T*>(tensor.mutable_data_ptr()), shape_of(tensor)};
}
OptionalOffs offs_view(const OptionalTensor& offs);
ConstFloatView const_float_view(const Tensor& tensor);
FloatView float_view(const Tensor& tensor);

// ---- errors ----------------------------------------------------------------------------------

[[noreturn]] void rethrow(const char* op, const Error& error);        // a ValueError in Python
[[noreturn]] void rethrow(const char* op, const DeviceError& error);  // a RuntimeError

// Runs body and converts the core's exceptions to torch's, under the name of this op.
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
