#include "moxie/core/layout/parse.h"

#include "moxie/core/base/check.h"

namespace moxie {

Block parse_block(std::string_view text, std::string_view op, std::string_view argument) {
  for (const Block block : kBlocks)
    if (name(block) == text) return block;
  std::string known;
  for (const Block block : kBlocks) known += (known.empty() ? "" : ", ") + name(block);
  fail(op, ": ", argument, " must be one of ", known, ", got '", text, "'");
}

ScaleRule parse_rule(std::string_view text, std::string_view op) {
  for (const auto rule : {ScaleRule::kRceil, ScaleRule::kFloor, ScaleRule::kCeil, ScaleRule::kEven})
    if (name(rule) == text) return rule;
  fail(op, ": rule must be one of rceil, floor, ceil, even, got '", text, "'");
}

ScaleLayout parse_layout(std::string_view text, std::string_view op, std::string_view argument) {
  for (const auto layout : {ScaleLayout::kPlain, ScaleLayout::kSwizzled, ScaleLayout::kQuads})
    if (name(layout) == text) return layout;
  fail(op, ": ", argument, " must be plain, swizzled or quads, got '", text, "'");
}

}  // namespace moxie
