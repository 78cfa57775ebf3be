#include "moxie/torch/mx_tensor.h"

#include "moxie/core/layout/parse.h"
#include "moxie/torch/ops.h"
#include "moxie/torch/view.h"

namespace moxie {

MxTensor MxTensor::from_qdata_and_scales(at::Tensor qdata, at::Tensor scale, at::ScalarType dtype,
                                         std::string_view block) {
  constexpr const char* kOp = "MxTensor";
  return ops::with_op(kOp, [&] {
    ops::check_e4m3({kOp, "qdata", qdata});
    ops::check_e8m0({kOp, "scale", scale});
    TORCH_CHECK_VALUE(qdata.dim() == 2, kOp, ": qdata must be [rows, cols], got ", qdata.dim(),
                      " dims");
    ops::check_device({kOp, "scale", scale}, qdata);
    ops::high_precision(dtype, kOp);
    const Block parsed = parse_block(block, kOp, "block");
    ops::check_block(kOp, Form::kRowwise, parsed, std::nullopt);
    const auto expected = operand_shape<c10::SymInt>(ops::sym_shape(qdata), {}, Form::kRowwise,
                                                     parsed, ScaleLayout::kPlain);
    ops::check_shape({kOp, "scale", scale}, expected.scale);
    return MxTensor{std::move(qdata), std::move(scale), std::string(block), dtype};
  });
}

MxTensor MxTensor::to_mx(const at::Tensor& x, std::string_view block, std::string_view rule) {
  auto [qdata, scale] = ops::quantize_rowwise(x, {.rowwise_block = block, .rule = rule});
  return {qdata, scale, std::string(block), x.scalar_type()};
}

at::Tensor MxTensor::dequantize() const {
  return ops::dequantize_rowwise(qdata, scale, {.block = block, .dtype = dtype});
}

}  // namespace moxie
