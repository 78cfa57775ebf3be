#include "moxie/core/scale_layout/scale_layout.h"

#include "moxie/core/base/check.h"
#include "moxie/core/base/dispatch.h"
#include "moxie/core/scale_layout/backends.h"

namespace moxie {
namespace {

// Checks the plain side and offs of swizzle and unswizzle.
Panels check_swizzle(std::string_view op, const Shape& plain, const Shape& swizzled,
                     const OptionalOffs& offs, Form form, Backend backend) {
  MOXIE_CHECK(plain.dims == 2 || plain.dims == 3, op,
              ": plain scales must be [rows, cols] or [groups, rows, cols], got ", plain);
  MOXIE_CHECK(plain.dims == 2 || !offs, op, ": offs must be absent for a stack of scales, got ",
              plain);
  if (offs) {
    const bool rowwise = form == Form::kRowwise;
    check_offs(op, *offs, rowwise ? plain[0] : plain[1], rowwise ? "rows" : "scale columns",
               backend);
  }
  check_shape(op, "swizzled", swizzled, swizzled_shape<int64_t>(plain, num_groups(offs), form));
  return swizzle_panels(plain, offs ? offs->data : nullptr, num_groups(offs).value_or(1), form);
}

void check_replicate(std::string_view op, const Shape& replicated, const Shape& compact, Form form,
                     Block block) {
  MOXIE_CHECK(replicated.dims == 2 || replicated.dims == 3, op,
              ": scales must be [outer, cols] or [groups, outer, cols], got ", replicated);
  bool known = false;
  for (const Block candidate : kBlocks) known = known || candidate == block;
  MOXIE_CHECK(known && is_operand_block(block, form), op, ": block must be one of a ", name(form),
              " operand, got ", name(block));
  check_shape(op, "compact", compact, compact_shape<int64_t>(replicated, form, block));
}

void check_constant_in_blocks(const CompactArgs& args) {
  const Shape& shape = args.replicated.shape;
  const int64_t cols = shape.dim(-1), outer = shape.dim(-2);
  const int64_t outer_block = outer_of(args.block, args.form);
  const int64_t k_block = k_of(args.block, args.form) / kMxBlock;
  for (int64_t i = 0; i < numel(shape); ++i) {
    const int64_t col = i % cols, row = i / cols % outer;
    const int64_t first = i - col % k_block - row % outer_block * cols;
    MOXIE_CHECK(args.replicated.data[i] == args.replicated.data[first],
                "compact_scale: scales must be constant in each ", name(args.block),
                " block, got code ", int{args.replicated.data[i].code}, " beside ",
                int{args.replicated.data[first].code}, " at row ", row, ", column ", col);
  }
}

}  // namespace

void swizzle_scale(const SwizzleArgs& args, const Exec& exec) {
  const Panels panels = check_swizzle("swizzle_scale", args.plain.shape, args.swizzled.shape,
                                      args.offs, args.form, exec.backend);
  dispatch(
      "swizzle_scale", exec, [&] { ref::swizzle_scale(args, panels); },
      [&] { cpu::swizzle_scale(args, panels, exec); },
      [&](auto stream) { cuda::swizzle_scale(args, panels, stream); });
}

void unswizzle_scale(const UnswizzleArgs& args, const Exec& exec) {
  const Panels panels = check_swizzle("unswizzle_scale", args.plain.shape, args.swizzled.shape,
                                      args.offs, args.form, exec.backend);
  dispatch(
      "unswizzle_scale", exec, [&] { ref::unswizzle_scale(args, panels); },
      [&] { cpu::unswizzle_scale(args, panels, exec); },
      [&](auto stream) { cuda::unswizzle_scale(args, panels, stream); });
}

void replicate_scale(const ReplicateArgs& args, const Exec& exec) {
  check_replicate("replicate_scale", args.replicated.shape, args.compact.shape, args.form,
                  args.block);
  dispatch(
      "replicate_scale", exec, [&] { ref::replicate_scale(args); },
      [&] { cpu::replicate_scale(args, exec); },
      [&](auto stream) { cuda::replicate_scale(args, stream); });
}

void compact_scale(const CompactArgs& args, const Exec& exec) {
  check_replicate("compact_scale", args.replicated.shape, args.compact.shape, args.form,
                  args.block);
  if (exec.backend != Backend::kCuda) check_constant_in_blocks(args);
  dispatch(
      "compact_scale", exec, [&] { ref::compact_scale(args); },
      [&] { cpu::compact_scale(args, exec); },
      [&](auto stream) { cuda::compact_scale(args, stream); });
}

}  // namespace moxie
