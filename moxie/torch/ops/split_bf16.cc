#include "moxie/torch/ops/split_bf16.h"

#include "moxie/core/split/split.h"
#include "moxie/torch/exec.h"
#include "moxie/torch/ops/register.h"

namespace moxie::ops {
namespace {

constexpr const char* kOp = "split_bf16";

SplitTerms parse_terms(at::IntArrayRef terms) {
  TORCH_CHECK_VALUE(!terms.empty() && terms.size() <= kMaxSplitTerms, kOp, ": there must be 1 to ",
                    kMaxSplitTerms, " terms, got ", terms.size());
  SplitTerms parsed{.count = static_cast<int>(terms.size())};
  for (size_t i = 0; i < terms.size(); ++i) {
    TORCH_CHECK_VALUE(terms[i] >= 0 && terms[i] < kBf16Terms, kOp, ": terms must be 0 to ",
                      kBf16Terms - 1, ", got ", terms[i]);
    parsed.term[i] = static_cast<uint8_t>(terms[i]);
  }
  return parsed;
}

Factors split_op(const Tensor& x, at::IntArrayRef terms, const OptionalTensor& w) {
  return with_op(kOp, [&]() -> Factors {
    const SplitTerms parsed = parse_terms(terms);
    TORCH_CHECK_TYPE(x.scalar_type() == at::kFloat, kOp, ": x must be torch.float32, got ",
                     dtype_name(x.scalar_type()));
    TORCH_CHECK_VALUE(x.dim() == 2, kOp, ": x must be a matrix, got ", x.dim(), " dims");
    Results results{{"terms", at::kBFloat16, {x.sym_size(0), x.sym_size(1) * parsed.count}}};
    if (w)
      results.push_back({"copies", at::kBFloat16, {w->sym_size(0) * parsed.count, w->sym_size(1)}});
    const auto out = allocate(results, x);
    Factors factors{out[0], w ? out[1] : Tensor()};
    if (x.is_meta()) return factors;
    const DeviceScope scope(x.device());
    const Tensor from = dense(x);
    SplitArgs args{.x = const_view<float>(from), .terms = parsed, .out = view<bf16>(out[0])};
    const OptionalTensor right = dense(w);
    if (right) args.copies = {const_view<bf16>(*right), view<bf16>(out[1])};
    split(args, scope.exec());
    return factors;
  });
}

void register_ops(torch::Library& m) { m.impl("_split_bf16", TORCH_FN(terms_of)); }

}  // namespace

Tensor terms_of(const Tensor& x, at::IntArrayRef terms) { return split_op(x, terms, {}).terms; }

Factors factors_of(const Tensor& x, at::IntArrayRef terms, const Tensor& w) {
  return split_op(x, terms, w);
}

MOXIE_REGISTER_OPS(register_ops)

}  // namespace moxie::ops
