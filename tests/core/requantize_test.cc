// requantize gives the bytes of dequantize followed by quantize, for scales in any layout, on every
// backend of this machine.
#include "moxie/core/requantize/requantize.h"

#include <gtest/gtest.h>

#include "moxie/core/dequantize/dequantize.h"
#include "tests/support/every_layout.h"

namespace moxie::testing {
namespace {

constexpr Block k1x32{1, 32}, k32x1{32, 1}, k1x128{1, 128}, k128x1{128, 1}, k128x32{128, 32};

class RequantizeOn : public ReadsEveryLayout {
 protected:
  Bytes requantized(const LayoutProblem& problem, Block block, ScaleLayout layout, Block colwise,
                    ScaleLayout colwise_layout) const {
    return requantized(problem, block, layout, colwise, colwise_layout, exec());
  }
  static Bytes requantized(const LayoutProblem& problem, Block block, ScaleLayout layout,
                           Block colwise, ScaleLayout colwise_layout, const Exec& exec) {
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
};

INSTANTIATE_TEST_SUITE_P(, RequantizeOn, ::testing::ValuesIn(ref_and_backends_here()),
                         [](const auto& info) { return info.param.name; });

TEST_P(RequantizeOn, ReadsEveryLayoutAsPlainScales) {
  for (const LayoutProblem& problem : kLayoutProblems)
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

TEST_P(RequantizeOn, GivesTheBytesOfTheReference) {
  for (const LayoutProblem& problem : kLayoutProblems)
    for (const Block block : blocks(Form::kRowwise, problem))
      for (const Block colwise : blocks(Form::kColwise, problem))
        for (const ScaleLayout to : layouts(Form::kColwise, colwise))
          EXPECT_EQ(requantized(problem, block, kPlain, colwise, to),
                    requantized(problem, block, kPlain, colwise, to, {.backend = Backend::kRef}))
              << problem.name << ' ' << name(block) << " to " << name(colwise) << ' ' << name(to);
}

TEST(Requantize, IsQuantizeOfWhatDequantizeGives) {
  const Shape shape{260, 130};
  const std::vector<int32_t> offs{3, 131, 131, 250};
  Random random(3);
  const auto x = random_values<bf16>(random, numel(shape), Data::kGaussianLike);
  for (const Block row : {k1x32, k1x128})
    for (const Block col : {k32x1, k128x1, k128x32}) {
      const auto q = quantize_form(x, shape, Form::kRowwise, row, offs);
      std::vector<float> back(numel(shape));
      const View<const e4m3> qdata{q.qdata.data(), q.qdata_shape};
      const View<const e8m0> scale{q.scale.data(), q.scale_shape};
      dequantize({.form = Form::kRowwise,
                  .block = row,
                  .qdata = qdata,
                  .scale = scale,
                  .offs = view_of(offs),
                  .x = {back.data(), Format::kF32, shape}},
                 {.backend = Backend::kRef});
      const auto expected = quantize_form(back, shape, Form::kColwise, col, offs);
      for (const auto& backend : backends_here()) {
        if (backend.exec.backend == Backend::kCuda) continue;  // covered by fuzz_test
        Quantized out(shape, groups_of(offs), Form::kColwise, col);
        requantize({.block = row,
                    .qdata = qdata,
                    .scale = scale,
                    .offs = view_of(offs),
                    .colwise = out.operand()},
                   backend.exec);
        EXPECT_EQ(out.qdata, expected.qdata) << backend.name;
        EXPECT_EQ(out.scale, expected.scale) << backend.name;
      }
    }
}

}  // namespace
}  // namespace moxie::testing
