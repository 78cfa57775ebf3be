// requantize gives the bytes of dequantize followed by quantize, for scales in any layout, on every
// backend of this machine.
#include "moxie/core/requantize/requantize.h"

#include <gtest/gtest.h>

#include <cstring>

#include "moxie/core/dequantize/dequantize.h"
#include "tests/support/every_layout.h"
#include "tests/support/values.h"

namespace moxie::testing {
namespace {

constexpr Block k1x32{1, 32}, k32x1{32, 1}, k1x128{1, 128}, k128x1{128, 1}, k128x32{128, 32};

template <class T>
std::vector<T> as(const std::vector<uint8_t>& bytes) {
  std::vector<T> made(bytes.size());
  std::memcpy(made.data(), bytes.data(), bytes.size());
  return made;
}

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

// FP8 rows in runs with gaps, and the same rows together.
struct RowsInRuns {
  Shape shape;
  std::vector<std::byte> buffer;
  std::vector<RowRun> runs;
  int64_t stride;
  std::vector<int64_t> index;
  std::vector<uint8_t> together;

  RowsInRuns(Random& random, int64_t rows, int64_t cols) : shape(rows, cols) {
    stride = cols + random.pick<int64_t>({0, 8, 16, 48});
    const int64_t tokens = random.between(1, 200);
    int64_t bytes = 0;
    for (int64_t first = 0; first < tokens;) {
      bytes += 8 * random.between(0, 5);
      runs.push_back({first, bytes});
      const int64_t count = random.between(1, 120);
      first += count, bytes += count * stride;
    }
    buffer.resize(bytes);
    for (std::byte& byte : buffer) byte = static_cast<std::byte>(random.below(256));
    together.resize(rows * cols);
    for (int64_t r = 0; r < rows; ++r) {
      index.push_back(random.below(tokens));
      const RowsIn<const std::byte> here{
          .buffer = {buffer.data(), {bytes}}, .stride = stride, .runs = runs};
      std::memcpy(together.data() + r * cols, buffer.data() + begin_of(here, index.back()), cols);
    }
  }
};

TEST_P(RequantizeOn, ReadsRowsThatLieApartAsIfTheyLayTogether) {
  Random random(4);
  for (int i = 0; i < 60; ++i) {
    const auto rows = random.pick<int64_t>({1, 127, 128, 129, 300, 700});
    const RowsInRuns x(random, rows, random.pick<int64_t>({16, 128, 144, 512, 1040, 2048}));
    const Block block = random.pick<Block>({k1x32, k1x128});
    const Block colwise = random.pick<Block>({k32x1, k128x1, k128x32});
    const std::vector<int32_t> offs = random_offs(random, rows, random.pick<int64_t>({1, 3, 40}));
    const int64_t scales = ceil_div<int64_t>(x.shape[1], block.cols);
    std::vector<uint8_t> codes(rows * scales);
    for (uint8_t& code : codes) code = static_cast<uint8_t>(random.between(100, 140));
    const auto shape = operand_shape<int64_t>(x.shape, std::ssize(offs), Form::kColwise, colwise,
                                              ScaleLayout::kPlain);
    Values<std::byte> buffer(exec().backend, x.buffer);
    Values<int64_t> index(exec().backend, x.index);
    const auto made = [&](bool apart) {
      Arena arena(exec().backend);
      RequantizeArgs args{.block = block,
                          .qdata = arena.input(as<e4m3>(x.together), x.shape),
                          .scale = arena.input(as<e8m0>(codes), {rows, scales}),
                          .offs = arena.input(offs, {std::ssize(offs)}),
                          .colwise = {colwise, ScaleLayout::kPlain, arena.output<e4m3>(shape.qdata),
                                      arena.output<e8m0>(shape.scale)}};
      if (apart) {
        args.qdata.data = nullptr;
        args.apart = RowsIn<const std::byte>{.buffer = buffer.const_view(),
                                             .stride = x.stride,
                                             .runs = x.runs,
                                             .index = index.const_view()};
        if (!can_gather(args, exec())) {
          EXPECT_NE(exec().backend, Backend::kRef);
          EXPECT_THROW(requantize(args, exec()), Error);
          return Bytes{};
        }
      }
      requantize(args, exec());
      return arena.results();
    };
    const Bytes apart = made(true);
    if (apart.empty()) continue;
    ASSERT_EQ(apart, made(false)) << "case " << i;
  }
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
