#include "moxie/torch/mx_tensor.h"

#include <torch/csrc/autograd/custom_function.h>

#include "moxie/core/layout/parse.h"
#include "moxie/torch/view.h"

namespace moxie {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "MxTensor";

Tensor make_proxy(const Tensor& like, at::ScalarType dtype) {
  return like.new_empty({1, 1}, like.options().dtype(dtype)).expand_symint(like.sym_sizes());
}

struct Proxy : torch::autograd::Function<Proxy> {
  static Tensor forward(AutogradContext*, const Tensor& x) {
    return make_proxy(x, x.scalar_type());
  }
  static variable_list backward(AutogradContext*, variable_list grads) { return grads; }
};

struct Dequantize : torch::autograd::Function<Dequantize> {
  static Tensor forward(AutogradContext*, const Tensor& proxy, const MxTensor* mx) {
    return ops::dequantize_rowwise(mx->qdata, mx->scale,
                                   {.block = mx->block, .dtype = proxy.scalar_type()});
  }
  static variable_list backward(AutogradContext*, variable_list grads) {
    return {grads[0], Tensor()};
  }
};

}  // namespace

MxTensor MxTensor::from_qdata_and_scales(Tensor qdata, Tensor scale, at::ScalarType dtype,
                                         std::string_view block) {
  MxTensor mx{std::move(qdata), std::move(scale), std::string(block), Tensor()};
  mx.check(kOp);
  mx.proxy = make_proxy(mx.qdata, ops::high_precision(dtype, kOp));
  return mx;
}

void MxTensor::check(const char* op) const {
  ops::with_op(op, [&] {
    ops::check_e4m3({op, "qdata", qdata});
    ops::check_e8m0({op, "scale", scale});
    TORCH_CHECK_VALUE(qdata.dim() == 2, op, ": qdata must be [rows, cols], got ", qdata.dim(),
                      " dims");
    ops::check_device({op, "scale", scale}, qdata);
    const Block parsed = parse_block(block, op, "block");
    ops::check_block(op, Form::kRowwise, parsed, std::nullopt);
    const auto expected = operand_shape<c10::SymInt>(ops::sym_shape(qdata), {}, Form::kRowwise,
                                                     parsed, ScaleLayout::kPlain);
    ops::check_shape({op, "scale", scale}, expected.scale);
  });
}

MxTensor MxTensor::to_mx(const Tensor& x, std::string_view block, std::string_view rule) {
  TORCH_CHECK_VALUE(x.dim() == 2, kOp, ": x must be [rows, cols], got ", x.dim(), " dims");
  auto [qdata, scale] = ops::quantize_rowwise(x.detach(), {.block = block, .rule = rule});
  return {qdata, scale, std::string(block), Proxy::apply(x)};
}

Tensor MxTensor::dequantize() const { return Dequantize::apply(proxy, this); }

Tensor ops::grouped_mm(const MxTensor& x, const Tensor& w, const GroupedMmOptions& options) {
  return grouped_mm_mx(x.proxy, x.qdata, x.scale, w,
                       {.offs = options.offs,
                        .block = x.block,
                        .recipe = options.recipe,
                        .bias = options.bias,
                        .dtype = options.dtype,
                        .quantized_w = options.quantized_w,
                        .main_grad = options.main_grad});
}

}  // namespace moxie
