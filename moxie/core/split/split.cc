#include "moxie/core/split/split.h"

#include "moxie/core/base/check.h"
#include "moxie/core/base/dispatch.h"
#include "moxie/core/base/parallel.h"
#include "moxie/core/layout/check_args.h"
#include "moxie/core/split/backends.h"

namespace moxie {

namespace ref {

void split(const SplitArgs& args) {
  const KernelScope scope;
  const int64_t cols = args.x.dim(1);
  const SplitTerms& wanted = args.terms;
  for (int64_t r = 0; r < args.x.dim(0); ++r)
    for (int64_t c = 0; c < cols; ++c) {
      const auto terms = bf16_terms(args.x.data[r * cols + c]);
      for (int i = 0; i < wanted.count; ++i)
        args.out.data[(r * wanted.count + i) * cols + c] = terms[wanted.term[i]];
    }
  if (!args.copies) return;
  const auto& [from, to] = *args.copies;
  for (int64_t i = 0; i < numel(to.shape); ++i) to.data[i] = from.data[i % numel(from.shape)];
}

}  // namespace ref

void split(const SplitArgs& args, const Exec& exec) {
  const Shape& x = args.x.shape;
  const SplitTerms& terms = args.terms;
  MOXIE_CHECK(x.dims == 2, "split_bf16: x must be a matrix, got ", x);
  MOXIE_CHECK(terms.count >= 1 && terms.count <= kMaxSplitTerms, "split_bf16: there must be 1 to ",
              kMaxSplitTerms, " terms, got ", terms.count);
  for (int i = 0; i < terms.count; ++i)
    MOXIE_CHECK(terms.term[i] < kBf16Terms, "split_bf16: terms must be 0 to ", kBf16Terms - 1,
                ", got ", int{terms.term[i]});
  check_shape("split_bf16", "out", args.out.shape, {x[0], terms.count * x[1]});
  if (args.copies) {
    const Shape &from = args.copies->x.shape, &to = args.copies->out.shape;
    const bool fits =
        from.dims == 2 && to.dims == 2 && to[1] == from[1] && from[0] > 0 && to[0] % from[0] == 0;
    MOXIE_CHECK(fits, "split_bf16: copies of ", from, " do not fill ", to);
  }
  // On a CPU only tests call it: the router's products are in f64 there.
  dispatch(
      "split_bf16", exec, [&] { ref::split(args); },
      [&](auto stream) { cuda::split(args, stream); });
}

}  // namespace moxie
