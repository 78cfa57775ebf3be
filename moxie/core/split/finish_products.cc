#include "moxie/core/split/finish_products.h"

#include "moxie/core/base/dispatch.h"
#include "moxie/core/base/parallel.h"
#include "moxie/core/layout/check_args.h"
#include "moxie/core/split/backends.h"
#include "moxie/core/split/split.h"

namespace moxie {
namespace {

constexpr const char* kOp = "finish_products";

}  // namespace

namespace ref {

void finish_products(const FinishProductsArgs& args) {
  const KernelScope scope;
  if (const auto& dx = args.dx)
    for (int64_t i = 0; i < numel(dx->to.shape); ++i) {
      const bf16 rounded = to_bf16(dx->from.data[i]);
      dx->to.data[i] = dx->add ? to_bf16(to_float(rounded) + to_float(dx->add->data[i])) : rounded;
    }
  if (const auto& dweight = args.dweight) {
    const FloatView& to = dweight->to;
    const int64_t count = numel(to.shape);
    for (int64_t i = 0; i < count; ++i) {
      float sum = 0;
      for (int term = 0; term < kBf16Terms; ++term) sum += dweight->terms.data[term * count + i];
      if (to.format == Format::kBf16)
        static_cast<bf16*>(to.data)[i] = to_bf16(sum);
      else
        static_cast<float*>(to.data)[i] = sum;
    }
  }
}

}  // namespace ref

void finish_products(const FinishProductsArgs& args, const Exec& exec) {
  if (const auto& dx = args.dx) {
    check_shape(kOp, "dx", dx->to.shape, dx->from.shape);
    if (dx->add) check_shape(kOp, "the gradient to add", dx->add->shape, dx->from.shape);
  }
  if (const auto& dweight = args.dweight) {
    const Shape& to = dweight->to.shape;
    check_shape(kOp, "the products of terms", dweight->terms.shape, {kBf16Terms, to[0], to[1]});
  }
  // On a CPU only tests call it: the router's products are in f64 there.
  dispatch(
      kOp, exec, [&] { ref::finish_products(args); },
      [&](auto stream) { cuda::finish_products(args, stream); });
}

}  // namespace moxie
