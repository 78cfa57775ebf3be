// gate_logits: a router's logits, x weight^T in f32 for any dtypes, and their gradients.
//
// On a GPU, bf16 x is multiplied on tensor cores with f32 accumulation. An f32 factor (the weight,
// or the gradient of the logits) is split into three bf16 terms that add up to it (core/split),
// stacked so that one GEMM multiplies them all. No setting of torch changes the result: TF32 does
// not apply to bf16 GEMMs, and if cuBLAS splits K, its partial sums have the dtype of the result,
// which is f32.
#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>

#include "moxie/core/split/finish_products.h"
#include "moxie/torch/exec.h"
#include "moxie/torch/ops/register.h"
#include "moxie/torch/ops/split_bf16.h"

namespace moxie::ops {
namespace {

constexpr const char* kOp = "gate_logits";
constexpr int64_t kTerms = 3;
// The pairs of terms (i, j) with i + j <= 2, from which the product of two split operands is
// summed. The other pairs would add at most 2^-22 of the product, which is then rounded to bf16.
// The first three left terms are 0, 1, 2: all terms of the left operand, in order.
constexpr std::array<int64_t, 6> kLeftTerms = {0, 1, 2, 0, 0, 1};
constexpr std::array<int64_t, 6> kRightTerms = {0, 0, 0, 1, 2, 1};

// f64 is accepted for gradcheck.
void check_values(const Input& input) {
  if (input.tensor.scalar_type() != at::kDouble) check_float(input);
  TORCH_CHECK_VALUE(input.tensor.dim() == 2, input.op, ": ", input.name, " must be a matrix, got ",
                    input.tensor.dim(), " dims");
}

at::ScalarType dtype_of_logits(at::ScalarType x) {
  return x == at::kDouble ? at::kDouble : at::kFloat;
}

// The scope in which every GEMM of this file runs: f32 GEMMs are exact f32, whatever allow_tf32
// says. The guard affects this thread only.
struct ProductScope {
  explicit ProductScope(const Tensor& x) : device(x.device()) {}
  DeviceScope device;
  at::NoGradGuard no_grad;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  at::NoTF32Guard no_tf32;
};

bool on_tensor_cores(const Tensor& tensor, at::ScalarType x) {
  return tensor.is_cuda() && x == at::kBFloat16;
}

// The bf16 terms of weight [E, D], stacked: [terms * E, D].
Tensor stacked_terms(const Tensor& weight, at::IntArrayRef terms) {
  const Tensor wide = weight.to(at::kFloat).reshape({1, -1});
  const auto rows = static_cast<int64_t>(terms.size()) * weight.size(0);
  return terms_of(wide, terms).view({rows, weight.size(1)});
}

Tensor logits_of_bf16(const Tensor& x, const Tensor& weight) {
  if (weight.scalar_type() == at::kBFloat16) return at::mm(x, aligned(weight).t(), at::kFloat);
  // The terms of the weight are additional columns of one GEMM, so that x is read once.
  const Tensor terms = stacked_terms(weight, {0, 1, 2});
  return at::mm(x, terms.t(), at::kFloat).view({x.size(0), kTerms, weight.size(0)}).sum(1);
}

// The product dlogits * weight from the factors' bf16 terms, in bf16 if it is large, else in f32.
Tensor dx_product(const Tensor& left, const Tensor& right) {
  // If cuBLAS splits K and torch allows it (allow_bf16_reduced_precision_reduction, on by default),
  // a GEMM with a bf16 result adds partial sums in bf16. cuBLAS splits K if the result has too few
  // tiles to fill the GPU, so small results are computed in f32. Larger results contract at most
  // 6 terms of 1024 experts in one piece, and are rounded once.
  constexpr int64_t kManyElements = int64_t{1} << 23;  // 4 tiles of 128 x 128 for each of 128 SMs
  if (left.size(0) * right.size(1) < kManyElements) return at::mm(left, right, at::kFloat);
  return at::mm(left, right);
}

// What gate_logits_backward is asked for, if x is bf16 on a GPU.
struct Bf16Backward {
  const Tensor &dlogits, &weight;
  const OptionalTensor& x;  // present: the gradient of the weight is wanted
  bool wants_dx;
  const OptionalTensor& add;  // to dx

  std::vector<Tensor> run() const {
    const at::IntArrayRef all = kLeftTerms;
    const bool weight_is_split = weight.scalar_type() != at::kBFloat16;
    Tensor product, left;  // left: the first three terms
    if (wants_dx && !weight_is_split) {
      const Factors factors = factors_of(dlogits, all.slice(0, kTerms), weight);
      left = factors.terms;
      product = dx_product(left, factors.copies);
    } else {
      // Not a slice of all six terms: cuBLAS may sum operands with another stride in another order.
      if (x) left = terms_of(dlogits, all.slice(0, kTerms));
      if (wants_dx)
        product = dx_product(terms_of(dlogits, all), stacked_terms(weight, kRightTerms));
    }
    const Tensor of_terms = x ? at::mm(left.t(), aligned(*x), at::kFloat) : Tensor();
    return finish(product, of_terms);
  }

 private:
  // Rounds and adds up the products, dx first, in one launch.
  std::vector<Tensor> finish(const Tensor& product, const Tensor& of_terms) const {
    FinishProductsArgs args;
    Tensor dx, dweight;
    OptionalTensor added;  // outlives the launch
    if (wants_dx && product.scalar_type() == at::kBFloat16) {
      dx = add ? product.add_(*add) : product;
    } else if (wants_dx) {
      dx = at::empty(product.sizes(), product.options().dtype(at::kBFloat16));
      added = dense(add);
      args.dx = {.from = const_view<float>(product),
                 .add = added ? std::optional(const_view<bf16>(*added)) : std::nullopt,
                 .to = view<bf16>(dx)};
    }
    if (x) {
      const bool in_bf16 = weight.scalar_type() == at::kBFloat16;
      dweight =
          at::empty(weight.sizes(), of_terms.options().dtype(in_bf16 ? at::kBFloat16 : at::kFloat));
      args.dweight = {
          .terms = {of_terms.const_data_ptr<float>(), {kTerms, weight.size(0), weight.size(1)}},
          .to = float_view(dweight)};
    }
    if (args.dx || args.dweight) finish_products(args, DeviceScope(dlogits.device()).exec());
    std::vector<Tensor> grads;
    if (wants_dx) grads.push_back(dx);
    if (x) grads.push_back(dweight.to(weight.scalar_type()));
    return grads;
  }
};

Tensor gate_logits_op(const Tensor& x, const Tensor& weight) {
  return with_op(kOp, [&] {
    check_values({kOp, "x", x});
    check_values({kOp, "weight", weight});
    check_shape({kOp, "x", x}, {x.sym_size(0), weight.sym_size(1)});
    check_device({kOp, "weight", weight}, x);
    const auto dtype = dtype_of_logits(x.scalar_type());
    const SymShape shape{x.sym_size(0), weight.sym_size(0)};
    if (x.is_meta()) return allocate({{"logits", dtype, shape}}, x)[0];
    const ProductScope scope(x);
    if (on_tensor_cores(x, x.scalar_type())) return logits_of_bf16(aligned(x), weight);
    // On a CPU, the order in which a GEMM sums depends on a row's position. In f64 the differences
    // are too small to show in f32, so a token is routed alike wherever it stands.
    const auto wide = x.is_cpu() ? at::kDouble : dtype;
    // On a GPU, the order in which a GEMM sums depends on the alignment of its operands.
    return at::linear(aligned(x.to(wide)), aligned(weight.to(wide))).to(dtype);
  });
}

// Returns dx if x_dtype is given, then the gradient of the weight if x is given. `add`, another
// gradient of x, is added to dx after that is rounded to x_dtype.
std::vector<Tensor> gate_logits_backward_op(const Tensor& dlogits, const Tensor& weight,
                                            const OptionalTensor& x,
                                            std::optional<at::ScalarType> x_dtype,
                                            const OptionalTensor& add) {
  return with_op(kOp, [&] {
    check_values({kOp, "weight", weight});
    check_shape({kOp, "dlogits", dlogits}, {dlogits.sym_size(0), weight.sym_size(0)});
    check_device({kOp, "weight", weight}, dlogits);
    Results results;
    if (x_dtype) results.push_back({"dx", *x_dtype, {dlogits.sym_size(0), weight.sym_size(1)}});
    if (x) {
      check_shape({kOp, "x", *x}, {dlogits.sym_size(0), weight.sym_size(1)});
      check_device({kOp, "x", *x}, dlogits);
      TORCH_CHECK_TYPE(!x_dtype || *x_dtype == x->scalar_type(), kOp,
                       ": x_dtype must be that of x");
      results.push_back({"dweight", weight.scalar_type(), sym_shape(weight)});
    }
    if (add) {
      TORCH_CHECK_VALUE(x_dtype, kOp, ": a gradient to add needs x_dtype");
      TORCH_CHECK_TYPE(add->scalar_type() == *x_dtype, kOp, ": the gradient to add must be ",
                       dtype_name(*x_dtype), ", got ", dtype_name(add->scalar_type()));
      check_shape({kOp, "the gradient to add", *add}, {dlogits.sym_size(0), weight.sym_size(1)});
      check_device({kOp, "the gradient to add", *add}, dlogits);
    }
    if (dlogits.is_meta() || results.empty()) return allocate(results, dlogits);
    const ProductScope scope(dlogits);
    if (on_tensor_cores(dlogits, x ? x->scalar_type() : *x_dtype))
      return Bf16Backward{dlogits, weight, x, x_dtype.has_value(), add}.run();
    std::vector<Tensor> grads;
    const auto wide = dlogits.scalar_type();
    if (x_dtype) {
      const Tensor dx = dlogits.matmul(weight.to(wide)).to(*x_dtype);
      grads.push_back(add ? dx.add_(*add) : dx);
    }
    if (x) grads.push_back(dlogits.t().matmul(x->to(wide)).to(weight.scalar_type()));
    return grads;
  });
}

void register_ops(torch::Library& m) {
  m.impl("gate_logits", TORCH_FN(gate_logits_op));
  m.impl("_gate_logits_backward", TORCH_FN(gate_logits_backward_op));
}

}  // namespace

MOXIE_REGISTER_OPS(register_ops)

}  // namespace moxie::ops
