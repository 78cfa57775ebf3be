#include "moxie/core/gemm/grouped_wgrad.h"

#include "moxie/core/base/check.h"
#include "moxie/core/base/dispatch.h"
#include "moxie/core/gemm/backends.h"

namespace moxie {
namespace {

Panels check(const GroupedWgradArgs& args, Backend backend) {
  const Shape a = args.a.qdata.shape, b = args.b.qdata.shape;
  MOXIE_CHECK(a.dims == 2 && b.dims == 2,
              "grouped_wgrad: a must be [n, padded rows] and b [k, padded rows], got ", a, " and ",
              b);
  const Panels panels = make_panels("grouped_wgrad", {args.rows, a[0]}, args.offs, backend);
  MOXIE_CHECK(args.a.k_block == args.b.k_block,
              "grouped_wgrad: a and b must have the same rows per block, got ", args.a.k_block,
              " and ", args.b.k_block);
  const int64_t padded = colwise_k(args.rows, num_groups(args.offs), args.a.k_block);
  check_shape("grouped_wgrad", "a", a, {a[0], padded});
  check_shape("grouped_wgrad", "b", b, {b[0], padded});
  check_gemm_operand("grouped_wgrad", "a", args.a);
  check_gemm_operand("grouped_wgrad", "b", args.b);
  check_shape("grouped_wgrad", "out", args.out.shape, {panels.count, a[0], b[0]});
  MOXIE_CHECK(args.sum == Sum::kOverwrite || args.out.format == Format::kF32,
              "grouped_wgrad: out must be f32 to add to it, got ", name(args.out.format));
  return panels;
}

void check_workspace(const View<std::byte>& workspace) {
  check_shape("grouped_wgrad", "workspace", workspace.shape, {kWgradWorkspace});
  MOXIE_CHECK(reinterpret_cast<uintptr_t>(workspace.data) % kWgradWorkspaceAlignment == 0,
              "grouped_wgrad: workspace must be aligned to ", kWgradWorkspaceAlignment,
              " bytes, got ", static_cast<const void*>(workspace.data));
}

}  // namespace

void grouped_wgrad(const GroupedWgradArgs& args, const Exec& exec) {
  const Panels panels = check(args, exec.backend);
  if (exec.backend == Backend::kCuda) {
    const std::string reason = why_not_sm90(args);
    MOXIE_CHECK(reason.empty(), "grouped_wgrad: ", reason);
    if (args.padding == Padding::kAnything && args.offs) check_workspace(args.workspace);
  }
  dispatch(
      "grouped_wgrad", exec, [&] { ref::grouped_wgrad(args, panels); },
      [&](auto stream) { sm90::grouped_wgrad(args, panels, stream); });
}

}  // namespace moxie
