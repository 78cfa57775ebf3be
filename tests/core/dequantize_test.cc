// dequantize and requantize read scales in any layout as they read plain ones, on every backend
// here.
#include "moxie/core/dequantize/dequantize.h"

#include <gtest/gtest.h>

#include <string>

#include "moxie/core/base/check.h"
#include "moxie/core/requantize/requantize.h"
#include "tests/support/arena.h"
#include "tests/support/backends.h"
#include "tests/support/random.h"
#include "tests/support/tensors.h"

namespace moxie::testing {
namespace {

using Bytes = std::vector<std::vector<uint8_t>>;
constexpr auto kPlain = ScaleLayout::kPlain, kSwizzled = ScaleLayout::kSwizzled,
               kQuads = ScaleLayout::kQuads;

struct Problem {
  const char* name;
  Shape x;
  std::vector<int32_t> offs;
};

std::vector<int32_t> every_three_rows(int32_t groups) {
  std::vector<int32_t> offs(groups);
  for (int32_t g = 0; g < groups; ++g) offs[g] = g % 2 ? 3 * g : 3 * (g + 1);
  return offs;
}

// Columns that are aligned for the widest accesses, and columns that are not; the last tile cut.
const Problem kProblems[] = {
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
  // Infinity and NaN among them. What lies outside of the panels is NaN, as nobody may look at it.
  static Quantized quantized(const Problem& problem, Form form, Block block, ScaleLayout layout) {
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

  Bytes dequantized(const Problem& problem, Form form, Block block, ScaleLayout layout,
                    Format format) const {
    const Quantized from = quantized(problem, form, block, layout);
    Arena arena(exec().backend);
    DequantizeArgs args{.form = form,
                        .block = block,
                        .layout = layout,
                        .qdata = arena.input(from.qdata, from.qdata_shape),
                        .scale = arena.input(from.scale, from.scale_shape)};
    if (!problem.offs.empty())
      args.offs = arena.input(problem.offs, {static_cast<int64_t>(problem.offs.size())});
    args.x = arena.float_output(format, problem.x);
    dequantize(args, exec());
    return arena.results();
  }

  Bytes requantized(const Problem& problem, Block block, ScaleLayout layout, Block colwise,
                    ScaleLayout colwise_layout) const {
    return requantized(problem, block, layout, colwise, colwise_layout, exec());
  }
  static Bytes requantized(const Problem& problem, Block block, ScaleLayout layout, Block colwise,
                           ScaleLayout colwise_layout, const Exec& exec) {
    const Quantized from = quantized(problem, Form::kRowwise, block, layout);
    Arena arena(exec.backend);
    RequantizeArgs args{.block = block,
                        .from_layout = layout,
                        .qdata = arena.input(from.qdata, from.qdata_shape),
                        .scale = arena.input(from.scale, from.scale_shape)};
    if (!problem.offs.empty())
      args.offs = arena.input(problem.offs, {static_cast<int64_t>(problem.offs.size())});
    const auto shape = operand_shape<int64_t>(problem.x, groups_of(problem.offs), Form::kColwise,
                                              colwise, colwise_layout);
    args.colwise = {colwise, colwise_layout, arena.output<e4m3>(shape.qdata),
                    arena.output<e8m0>(shape.scale)};
    requantize(args, exec);
    return arena.results();
  }

  const Exec& exec() const { return GetParam().exec; }

  static std::vector<Block> blocks(Form form, const Problem& problem) {
    std::vector<Block> all;
    for (const Block block : kBlocks)
      if (is_operand_block(block, form) &&
          (form == Form::kColwise || block.rows == 1 || problem.offs.empty()))
        all.push_back(block);
    return all;
  }
  // But plain.
  static std::vector<ScaleLayout> layouts(Form form, Block block) {
    if (k_of(block, form) == kQuadBlock) return {kSwizzled, kQuads};
    return {kSwizzled};
  }
};

INSTANTIATE_TEST_SUITE_P(, ReadsEveryLayout, ::testing::ValuesIn([] {
                           auto all = backends_here();
                           all.insert(all.begin(), {"ref", {.backend = Backend::kRef}});
                           return all;
                         }()),
                         [](const auto& info) { return info.param.name; });

TEST_P(ReadsEveryLayout, Dequantize) {
  for (const Problem& problem : kProblems)
    for (const Form form : {Form::kRowwise, Form::kColwise})
      for (const Block block : blocks(form, problem))
        for (const ScaleLayout layout : layouts(form, block))
          for (const Format format : {Format::kBf16, Format::kF32})
            EXPECT_EQ(dequantized(problem, form, block, layout, format),
                      dequantized(problem, form, block, kPlain, format))
                << problem.name << ' ' << name(form) << ' ' << name(block) << ' ' << name(layout)
                << ' ' << name(format);
}

TEST_P(ReadsEveryLayout, Requantize) {
  for (const Problem& problem : kProblems)
    for (const Block block : blocks(Form::kRowwise, problem))
      for (const Block colwise : blocks(Form::kColwise, problem)) {
        auto results = layouts(Form::kColwise, colwise);
        results.push_back(kPlain);
        for (const ScaleLayout from : layouts(Form::kRowwise, block))
          for (const ScaleLayout to : results)
            EXPECT_EQ(requantized(problem, block, from, colwise, to),
                      requantized(problem, block, kPlain, colwise, to))
                << problem.name << ' ' << name(block) << ' ' << name(from) << " to "
                << name(colwise) << ' ' << name(to);
      }
}

TEST_P(ReadsEveryLayout, RequantizeGivesTheBytesOfTheReference) {
  for (const Problem& problem : kProblems)
    for (const Block block : blocks(Form::kRowwise, problem))
      for (const Block colwise : blocks(Form::kColwise, problem))
        for (const ScaleLayout to : layouts(Form::kColwise, colwise))
          EXPECT_EQ(requantized(problem, block, kPlain, colwise, to),
                    requantized(problem, block, kPlain, colwise, to, {.backend = Backend::kRef}))
              << problem.name << ' ' << name(block) << " to " << name(colwise) << ' ' << name(to);
}

TEST(SwizzledScales, MustHaveTheShapeOfTheirLayout) {
  const Shape x{70, 96};
  const std::vector<float> values(numel(x), 1);
  const auto plain = quantize_form(values, x, Form::kRowwise, {1, 32}, {70});
  const View<const e4m3> qdata{plain.qdata.data(), plain.qdata_shape};
  const View<const e8m0> scale{plain.scale.data(), plain.scale_shape};
  const std::vector<int32_t> offs{70};
  std::vector<float> out(numel(x));
  Quantized colwise(x, 1, Form::kColwise, {32, 1});
  const auto message = [](auto&& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  const Exec ref{.backend = Backend::kRef};
  EXPECT_EQ(message([&] {
              dequantize({.block = {1, 32},
                          .layout = kSwizzled,
                          .qdata = qdata,
                          .scale = scale,
                          .offs = view_of(offs),
                          .x = {out.data(), Format::kF32, x}},
                         ref);
            }),
            "dequantize: scale must be [198, 4], got [70, 3]");
  EXPECT_EQ(message([&] {
              requantize({.block = {1, 32},
                          .from_layout = kSwizzled,
                          .qdata = qdata,
                          .scale = scale,
                          .offs = view_of(offs),
                          .colwise = colwise.operand()},
                         ref);
            }),
            "requantize: scale must be [198, 4], got [70, 3]");
}

}  // namespace
}  // namespace moxie::testing
