#include "moxie/core/gemm/product.h"

#include "moxie/core/base/check.h"
#include "moxie/core/base/dispatch.h"
#include "moxie/core/gemm/backends.h"

namespace moxie {
namespace {

Panels check(const ProductArgs& args, Backend backend) {
  const Shape &a = args.a.shape, &b = args.b.shape;
  MOXIE_CHECK(a.dims == 2, "product: a must be [rows, cols], got ", a);
  const Panels panels = make_panels("product", a, args.offs, backend);
  MOXIE_CHECK(args.a.format == args.b.format, "product: a and b must have the same format, got ",
              name(args.a.format), " and ", name(args.b.format));
  const bool wgrad = args.pass == Pass::kWgrad;
  MOXIE_CHECK(b.dims == (wgrad ? 2 : 3), "product: b must be ",
              wgrad ? "[rows, k]" : "[groups, n, k]", ", got ", b);
  if (wgrad) {
    MOXIE_CHECK(b[0] == a[0], "product: a and b must have the same number of rows, got ", a[0],
                " and ", b[0]);
    check_shape("product", "out", args.out.shape, {panels.count, a[1], b[1]});
  } else {
    const bool forward = args.pass == Pass::kForward;
    MOXIE_CHECK(b[0] == panels.count, "product: b must have one matrix for each of ", panels.count,
                " groups, got ", b[0]);
    MOXIE_CHECK(a[1] == (forward ? b[2] : b[1]),
                "product: a and b must have the same size in the contracted dimension of ",
                name(args.pass), ", got ", a[1], " and ", forward ? b[2] : b[1]);
    check_shape("product", "out", args.out.shape, {a[0], forward ? b[1] : b[2]});
  }
  MOXIE_CHECK(!args.bias || args.pass == Pass::kForward, "product: ", name(args.pass),
              " takes no bias");
  check_bias("product", args.bias, panels.count, args.out.dim(1));
  MOXIE_CHECK(args.sum == Sum::kOverwrite || (wgrad && args.out.format == Format::kF32),
              "product: only the f32 result of wgrad can be added to, got ", name(args.pass),
              " to ", name(args.out.format));
  return panels;
}

}  // namespace

void product(const ProductArgs& args, const Exec& exec) {
  const Panels panels = check(args, exec.backend);
  dispatch(
      "product", exec, [&] { ref::product(args, panels); },
      [&](auto stream) { cuda::product(args, panels, stream); });
}

void finish_rows(const FinishRowsArgs& args, const Exec& exec) {
  const Panels panels = make_panels("finish_rows", args.out.shape, args.offs, exec.backend);
  check_bias("finish_rows", args.bias, panels.count, panels.cols);
  dispatch(
      "finish_rows", exec, [&] { ref::finish_rows(args, panels); },
      [&](auto stream) { cuda::finish_rows(args, panels, stream); });
}

}  // namespace moxie
