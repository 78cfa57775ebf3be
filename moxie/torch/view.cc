#include "moxie/torch/view.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

namespace moxie::ops {

std::string dtype_name(at::ScalarType dtype) {
  return "torch." + std::string(c10::getDtypeNames(dtype).first);
}

namespace {

bool has_shape(const Tensor& tensor, const SymShape& shape) {
  const auto sizes = tensor.sym_sizes();
  bool equal = static_cast<int64_t>(sizes.size()) == shape.dims;
  for (int i = 0; equal && i < shape.dims; ++i) equal = same(sizes[i], shape[i]);
  return equal;
}

template <class Int>
BasicShape<Int> shape_from(c10::ArrayRef<Int> size) {
  switch (size.size()) {
    case 1: return {size[0]};
    case 2: return {size[0], size[1]};
    case 3: return {size[0], size[1], size[2]};
    default: TORCH_CHECK_VALUE(false, "expected 1 to 3 dims, got ", size.size());
  }
}

std::optional<Shape> known(const SymShape& shape) {
  Shape known;
  known.dims = shape.dims;
  for (int i = 0; i < 3; ++i) {
    const auto size = shape[i].maybe_as_int();
    if (!size) return std::nullopt;
    known.size[i] = *size;
  }
  return known;
}

SymShape symbolic(const Shape& shape) {
  SymShape symbolic(shape[0], shape[1], shape[2]);
  symbolic.dims = shape.dims;
  return symbolic;
}

std::string text(const SymShape& shape) {
  std::ostringstream out;
  out << '[';
  for (int i = 0; i < shape.dims; ++i) out << (i ? ", " : "") << shape[i];
  out << ']';
  return out.str();
}

// A None argument arrives as an undefined tensor.
void check_given(const Input& input) {
  TORCH_CHECK_TYPE(input.tensor.defined(), input.op, ": ", input.name,
                   " must be a tensor, got None");
}

}  // namespace

// ---- arguments -------------------------------------------------------------------------------

void check_float(const Input& input) {
  check_given(input);
  const auto dtype = input.tensor.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kBFloat16 || dtype == at::kFloat, input.op, ": ", input.name,
                   " must be torch.bfloat16 or torch.float32, got ", dtype_name(dtype));
}

void check_e4m3(const Input& input) {
  check_given(input);
  const auto dtype = input.tensor.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat8_e4m3fn, input.op, ": ", input.name,
                   " must be torch.float8_e4m3fn, got ", dtype_name(dtype));
}

void check_e8m0(const Input& input) {
  check_given(input);
  const auto dtype = input.tensor.scalar_type();
  TORCH_CHECK_TYPE(
      dtype == at::kFloat8_e8m0fnu, input.op, ": ", input.name,
      " must be torch.float8_e8m0fnu, got ", dtype_name(dtype),
      dtype == at::kByte ? "; if its bytes are e8m0, pass .view(torch.float8_e8m0fnu)" : "");
}

void check_scale(const Input& scale, Scaling scaling) {
  const auto dtype = scale.tensor.scalar_type();
  if (scaling == Scaling::kRow) {
    TORCH_CHECK_TYPE(dtype == at::kFloat, scale.op, ": ", scale.name,
                     " must be torch.float32 in this recipe, got ", dtype_name(dtype));
  } else if (dtype != at::kByte) {
    check_e8m0(scale);
  }
}

void check_int32(const Input& input) {
  check_given(input);
  const auto& tensor = input.tensor;
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kInt, input.op, ": ", input.name,
                   " must be torch.int32, got ", dtype_name(tensor.scalar_type()),
                   tensor.scalar_type() == at::kLong ? "; pass .to(torch.int32)" : "");
  TORCH_CHECK_VALUE(tensor.dim() == 1, input.op, ": ", input.name, " must be [groups], got ",
                    tensor.dim(), " dims");
  const c10::SymInt groups = tensor.sym_size(0);
  TORCH_CHECK_VALUE(groups.sym_ge(1).expect_true(__FILE__, __LINE__) &&
                        groups.sym_le(kMaxGroups).expect_true(__FILE__, __LINE__),
                    input.op, ": ", input.name, " must hold 1 to ", kMaxGroups, " groups, got ",
                    groups);
}

void check_matrix_or_stack(const Input& input) {
  TORCH_CHECK_VALUE(input.tensor.dim() == 2 || input.tensor.dim() == 3, input.op, ": ", input.name,
                    " must be a matrix or a stack of matrices (2 or 3 dims), got ",
                    input.tensor.dim(), " dims");
}

void check_device(const Input& input, const Tensor& like) {
  TORCH_CHECK_VALUE(input.tensor.device() == like.device(), input.op,
                    ": all tensors must be on one device, got ", input.name, " on ",
                    input.tensor.device(), " beside ", like.device());
}

void check_shape(const Input& input, const SymShape& expected) {
  TORCH_CHECK_VALUE(has_shape(input.tensor, expected), input.op, ": ", input.name, " must be ",
                    text(expected), ", got ", input.tensor.sym_sizes());
}

void check_scale_shape(const Input& scale, const LayoutArg& said, const ScaleOf& of) {
  const auto shape_in = [&](ScaleLayout layout) {
    return operand_shape(of.x, num_groups(of.offs), of.form, of.block, layout).scale;
  };
  check_layout(scale.op, of.form, of.block, said.layout);
  const SymShape expected = shape_in(said.layout);
  if (has_shape(scale.tensor, expected)) return;
  std::ostringstream hint;
  for (const auto other : {ScaleLayout::kPlain, ScaleLayout::kSwizzled, ScaleLayout::kQuads}) {
    const bool possible = other != ScaleLayout::kQuads || k_of(of.block, of.form) == kQuadBlock;
    if (other == said.layout || !possible || !has_shape(scale.tensor, shape_in(other))) continue;
    hint << ", which has the shape of " << name(other) << " scales";
    // Without offs, swizzled scales can have the shape of plain ones, so the caller's layout may be
    // right.
    if (said.layout == ScaleLayout::kSwizzled && other == ScaleLayout::kPlain && of.offs)
      hint << ", or of " << name(said.layout) << " ones that were made without offs";
    else
      hint << "; pass " << said.name << "='" << name(other) << "'";
    break;
  }
  TORCH_CHECK_VALUE(false, scale.op, ": ", scale.name, " must be ", text(expected), ", got ",
                    scale.tensor.sym_sizes(), hint.str());
}

void check_offs(const char* op, const OptionalTensor& offs, const Tensor& x) {
  if (!offs) return;
  check_int32({op, "offs", *offs});
  check_device({op, "offs", *offs}, x);
  TORCH_CHECK_VALUE(x.dim() == 2, op, ": a stack of matrices takes no offs, its groups are all ",
                    "alike, got ", x.sym_sizes());
}

void check_block(const char* op, Form form, Block block, const OptionalTensor& offs) {
  // The check asks only whether there are offs, so one dummy end will do.
  static constexpr int32_t kSomeOffs = 0;
  Panels panels{};
  panels.offs = offs ? &kSomeOffs : nullptr;
  check_operand_block(op, form, block, panels);
}

SymShape sym_shape(const Tensor& tensor) { return shape_from(tensor.sym_sizes()); }

OperandShape<c10::SymInt> operand_shape(const SymShape& x,
                                        const std::optional<c10::SymInt>& num_groups, Form form,
                                        Block block, ScaleLayout layout) {
  const auto shape = known(x);
  const auto groups = num_groups ? num_groups->maybe_as_int() : std::nullopt;
  if (!shape || groups.has_value() != num_groups.has_value())
    return moxie::operand_shape(x, num_groups, form, block, layout);
  const auto of = moxie::operand_shape(*shape, groups, form, block, layout);
  return {symbolic(of.qdata), symbolic(of.scale)};
}

std::optional<c10::SymInt> num_groups(const OptionalTensor& offs) {
  return offs ? std::optional(offs->sym_size(0)) : std::nullopt;
}

Form parse_form(std::string_view text, std::string_view op) {
  for (const auto form : {Form::kRowwise, Form::kColwise})
    if (name(form) == text) return form;
  fail(op, ": form must be rowwise or colwise, got '", text, "'");
}

at::ScalarType high_precision(std::optional<at::ScalarType> dtype, const char* op) {
  const auto chosen = dtype.value_or(at::kBFloat16);
  TORCH_CHECK_TYPE(chosen == at::kBFloat16 || chosen == at::kFloat, op,
                   ": dtype must be torch.bfloat16 or torch.float32, got ", dtype_name(chosen));
  return chosen;
}

// ---- results ---------------------------------------------------------------------------------

std::vector<Tensor> allocate(const Results& results, const Tensor& like) {
  std::vector<Tensor> out;
  out.reserve(results.size());
  for (const auto& result : results)
    out.push_back(at::empty_symint(
        c10::SymIntArrayRef(result.shape.size.data(), static_cast<size_t>(result.shape.dims)),
        at::TensorOptions().dtype(result.dtype).device(like.device())));
  return out;
}

void check_out(const char* op, const Results& results, const std::vector<Tensor>& out,
               std::initializer_list<OptionalTensor> inputs) {
  TORCH_INTERNAL_ASSERT(results.size() == out.size());
  for (size_t i = 0; i < out.size(); ++i) {
    const Input output{op, results[i].name, out[i]};
    check_given(output);
    TORCH_CHECK_VALUE(!out[i].is_conj() && !out[i].is_neg(), op, ": ", results[i].name,
                      " is written in place and must not be a lazy conjugate or negative");
    TORCH_CHECK_VALUE(!out[i].is_inference() || c10::InferenceMode::is_enabled(), op, ": ",
                      results[i].name,
                      " is an inference tensor and can be written in inference mode only");
    // Inductor cannot write e8m0 tensors inside a graph, but it can write bytes.
    const bool as_bytes =
        results[i].dtype == at::kFloat8_e8m0fnu && out[i].scalar_type() == at::kByte;
    TORCH_CHECK_TYPE(out[i].scalar_type() == results[i].dtype || as_bytes, op, ": ",
                     results[i].name, " must be ", dtype_name(results[i].dtype), ", got ",
                     dtype_name(out[i].scalar_type()));
    check_device(output, **inputs.begin());
    check_shape(output, results[i].shape);
    TORCH_CHECK_VALUE(out[i].is_contiguous(), op, ": ", results[i].name,
                      " is written in place and must be contiguous, got strides ",
                      out[i].sym_strides());
    TORCH_CHECK_VALUE(!(out[i].requires_grad() && c10::GradMode::is_enabled()), op, ": ",
                      results[i].name, " is written in place and must not require grad");
    const auto shares_memory_with = [&](const Tensor& other) {
      if (out[i].is_meta()) return false;
      // A strided input has neither status, and may overlap: it is copied before the op writes.
      const auto status = at::get_overlap_status(out[i], other);
      return status == at::MemOverlapStatus::Full || status == at::MemOverlapStatus::Partial;
    };
    int argument = 0;
    for (const auto& input : inputs) {
      ++argument;
      TORCH_CHECK_VALUE(!input || !shares_memory_with(*input), op, ": ", results[i].name,
                        " shares memory with input ", argument);
    }
    for (size_t j = 0; j < i; ++j)
      TORCH_CHECK_VALUE(!shares_memory_with(out[j]), op, ": ", results[i].name,
                        " shares memory with ", results[j].name);
  }
}

void mark_written(const std::vector<Tensor>& out) {
  for (const auto& tensor : out)
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

// ---- views -----------------------------------------------------------------------------------

Tensor dense(const Tensor& tensor) {
  if (tensor.is_conj() || tensor.is_neg()) return dense(tensor.resolve_conj().resolve_neg());
  if (tensor.is_contiguous()) return tensor;
  if (tensor.element_size() == 1 && tensor.scalar_type() != at::kByte)
    return tensor.view(at::kByte).contiguous().view(tensor.scalar_type());
  return tensor.contiguous();
}

OptionalTensor dense(const OptionalTensor& tensor) {
  return tensor ? std::optional(dense(*tensor)) : std::nullopt;
}

bool is_aligned(const Tensor& tensor, size_t bytes) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % bytes == 0;
}

Tensor aligned(const Tensor& tensor, size_t bytes) {
  const Tensor as_is = dense(tensor);
  if (is_aligned(as_is, bytes)) return as_is;
  if (tensor.element_size() == 1) return as_is.view(at::kByte).clone().view(tensor.scalar_type());
  return as_is.clone();
}

Shape shape_of(const Tensor& tensor) { return shape_from(tensor.sizes()); }

void check_memory(const Tensor& tensor) {
  if (tensor.numel() == 0 || tensor.storage().nbytes() > 0) return;
  fail("view", ": a tensor of shape ", c10::str(tensor.sizes()),
       " has no memory: its storage was freed, as FSDP2 does with weights after forward");
}

OptionalOffs offs_view(const OptionalTensor& offs) {
  return offs ? OptionalOffs(const_view<int32_t>(*offs)) : std::nullopt;
}

namespace {

Format float_format(const Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  TORCH_INTERNAL_ASSERT(dtype == at::kFloat || dtype == at::kBFloat16, "no view of ", dtype);
  return dtype == at::kFloat ? Format::kF32 : Format::kBf16;
}

}  // namespace

ConstFloatView const_float_view(const Tensor& tensor) {
  check_memory(tensor);
  return {tensor.const_data_ptr(), float_format(tensor), shape_of(tensor)};
}

FloatView float_view(const Tensor& tensor) {
  check_memory(tensor);
  return {tensor.mutable_data_ptr(), float_format(tensor), shape_of(tensor)};
}

// ---- errors ----------------------------------------------------------------------------------

namespace {

// Core messages start with the name of a core function; replaces it by the name of the op.
std::string under_name(const char* op, std::string_view message) {
  const size_t colon = message.find(": ");
  const bool has_name = colon != message.npos;
  return std::string(op) + (has_name ? "" : ": ") +
         std::string(has_name ? message.substr(colon) : message);
}

}  // namespace

void rethrow(const char* op, const Error& error) {
  TORCH_CHECK_VALUE(false, under_name(op, error.what()));
}

void rethrow(const char* op, const DeviceError& error) {
  TORCH_CHECK(false, under_name(op, error.what()));
}

}  // namespace moxie::ops
