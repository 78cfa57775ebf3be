#include "moxie/core/gemm/grouped_mm.h"

#include "moxie/core/base/check.h"
#include "moxie/core/base/dispatch.h"
#include "moxie/core/gemm/backends.h"

namespace moxie {
namespace {

// b has one matrix per group of rows of a.
Panels check(const GroupedMmArgs& args, Backend backend) {
  const Shape a = args.a.qdata.shape, b = args.b.qdata.shape;
  const Panels panels = make_panels("grouped_mm", a, args.offs, backend);
  MOXIE_CHECK(a.dims == 2 && b.dims == 3,
              "grouped_mm: a must be [rows, k] and b [groups, n, k], got ", a, " and ", b);
  MOXIE_CHECK(a[1] == b[2], "grouped_mm: a and b must have the same k, got ", a[1], " and ", b[2]);
  MOXIE_CHECK(b[0] == panels.count, "grouped_mm: b must have one matrix for each of ", panels.count,
              " groups, got ", b[0]);
  check_gemm_operand("grouped_mm", "a", args.a);
  check_gemm_operand("grouped_mm", "b", args.b);
  MOXIE_CHECK(args.a.outer_block == 1 || !args.offs,
              "grouped_mm: with offs, blocks of a must be one row tall, got ", args.a.outer_block);
  check_shape("grouped_mm", "out", args.out.shape, {a[0], b[1]});
  check_bias("grouped_mm", args.bias, panels.count, b[1]);
  return panels;
}

}  // namespace

void grouped_mm(const GroupedMmArgs& args, const Exec& exec) {
  const Panels panels = check(args, exec.backend);
  if (exec.backend == Backend::kCuda) {
    const std::string reason = why_not_sm90(args);
    MOXIE_CHECK(reason.empty(), "grouped_mm: ", reason);
  }
  dispatch(
      "grouped_mm", exec, [&] { ref::grouped_mm(args, panels); },
      [&](auto stream) { sm90::grouped_mm(args, panels, stream); });
}

}  // namespace moxie
