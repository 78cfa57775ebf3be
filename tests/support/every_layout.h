// Test problems for ops that read quantized tensors: their results must not depend on the layout of
// the scales.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/arena.h"
#include "tests/support/backends.h"
#include "tests/support/random.h"
#include "tests/support/tensors.h"

namespace moxie::testing {

using Bytes = std::vector<std::vector<uint8_t>>;
inline constexpr auto kPlain = ScaleLayout::kPlain, kSwizzled = ScaleLayout::kSwizzled,
                      kQuads = ScaleLayout::kQuads;

struct LayoutProblem {
  const char* name;
  Shape x;
  std::vector<int32_t> offs;
};

inline std::vector<int32_t> every_three_rows(int32_t groups) {
  std::vector<int32_t> offs(groups);
  for (int32_t g = 0; g < groups; ++g) offs[g] = g % 2 ? 3 * g : 3 * (g + 1);
  return offs;
}

// Numbers of columns are multiples of 16 or not, and often end in a partial tile of 128.
inline const LayoutProblem kLayoutProblems[] = {
    {"empty, one row, exactly 128 rows, a tail", {500, 1296}, {0, 1, 1, 129, 257, 400, 400}},
    {"columns that no access fits", {300, 203}, {40, 41, 169, 290}},
    {"128 x 128", {128, 128}, {128}},
    {"many groups", {300, 272}, every_three_rows(70)},
    {"hundreds of groups", {1000, 144}, every_three_rows(300)},
    {"no rows", {0, 64}, {0, 0}},
    {"no group has rows", {100, 64}, {0, 0, 0}},
    {"no offs", {200, 400}, {}},
    {"weights", {3, 200, 144}, {}},
    {"weights of whole tiles", {3, 256, 128}, {}},
    {"weights of whole tiles and parts", {2, 400, 272}, {}},
};

class ReadsEveryLayout : public ::testing::TestWithParam<NamedExec> {
 protected:
  // Quantizes random values, with a NaN and an infinity. Scale bytes that hold no scale of a panel
  // are set to NaN, so that an op that used them would give a wrong result.
  static Quantized quantized(const LayoutProblem& problem, Form form, Block block,
                             ScaleLayout layout) {
    Random random(11);
    auto x = random_values<bf16>(random, numel(problem.x), Data::kGaussianLike);
    if (x.size() > 5000) x[5] = {0x7fc0}, x[4000] = {0xff80};
    auto out = quantize_form(x, problem.x, form, block, problem.offs, ScaleRule::kRceil, layout);
    if (layout == kPlain) return out;
    std::vector<bool> used(out.scale.size());
    const std::optional<int64_t> groups = groups_of(problem.offs);
    const bool weights = problem.x.dims == 3, rowwise = form == Form::kRowwise;
    const Panels panels{.rows = problem.x.dim(-2),
                        .cols = problem.x.dim(-1),
                        .count = weights ? problem.x[0] : groups.value_or(1),
                        .offs = groups ? problem.offs.data() : nullptr,
                        .weights = weights};
    Panel panel = first_panel();
    for (int64_t g = 0; g < panels.count; ++g) {
      panel = next_panel(panels, panel, rowwise ? 1 : block.rows);
      const Place place = place_of(panels, panel, form, block, layout);
      const int64_t k = rowwise ? panels.cols : panel.rows;
      const bool swizzled = layout == kSwizzled;
      const int64_t outer_block = swizzled ? 1 : outer_of(block, form);
      const int64_t k_block = swizzled ? kMxBlock : k_of(block, form);
      for (int64_t i = 0; i < ceil_div(place.outer, outer_block); ++i)
        for (int64_t j = 0; j < ceil_div(k, k_block); ++j)
          used[swizzled ? place.scale + swizzled_index(i, j, place.scale_stride)
                        : scale_index(place, layout, i, j)] = true;
    }
    for (size_t i = 0; i < used.size(); ++i)
      if (!used[i]) out.scale[i] = {kE8m0Nan};
    return out;
  }

  const Exec& exec() const { return GetParam().exec; }

  static std::vector<Block> blocks(Form form, const LayoutProblem& problem) {
    std::vector<Block> all;
    for (const Block block : kBlocks)
      if (is_operand_block(block, form) &&
          (form == Form::kColwise || block.rows == 1 || problem.offs.empty()))
        all.push_back(block);
    return all;
  }
  // The layouts other than plain that scales of this block can have.
  static std::vector<ScaleLayout> layouts(Form form, Block block) {
    if (k_of(block, form) == kQuadBlock) return {kSwizzled, kQuads};
    return {kSwizzled};
  }
};

inline std::vector<NamedExec> ref_and_backends_here() {
  auto all = backends_here();
  all.insert(all.begin(), {"ref", {.backend = Backend::kRef}});
  return all;
}

}  // namespace moxie::testing
