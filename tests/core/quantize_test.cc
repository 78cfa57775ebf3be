// The contract of quantize, on every backend of this machine.
#include "moxie/core/quantize/quantize.h"

#include <gtest/gtest.h>

#include <cmath>

#include "moxie/core/base/parallel.h"
#include "moxie/core/dequantize/dequantize.h"
#include "tests/support/arena.h"
#include "tests/support/backends.h"
#include "tests/support/random.h"
#include "tests/support/tensors.h"

namespace moxie::testing {
namespace {

constexpr Block k1x32{1, 32}, k32x1{32, 1}, k32x32{32, 32}, k1x128{1, 128}, k128x1{128, 1},
    k128x32{128, 32}, k128x128{128, 128};
const Exec kRef{.backend = Backend::kRef};

float f32(uint32_t bits) { return std::bit_cast<float>(bits); }

std::vector<bf16> gaussian(int64_t count, uint64_t seed = 1) {
  Random random(seed);
  return random_values<bf16>(random, count, Data::kGaussianLike);
}

// ---- the vectors of the spec (NUMERICS.md, section 4) ------------------------------------------

struct Vector {
  const char* name;
  std::vector<float> values;  // the first of 32; all further ones are `rest`
  float rest;
  ScaleRule rule;
  int code;
  std::vector<int> elements;
  int rest_element;
};

const Vector kVectors[] = {
    {"zero", {}, 0.f, ScaleRule::kRceil, 0, {}, 0x00},
    {"negative zero keeps its sign", {}, -0.f, ScaleRule::kFloor, 0, {}, 0x80},
    {"smallest normal", {}, f32(0x00800000), ScaleRule::kRceil, 0, {}, 0x40},
    {"smallest normal", {}, -f32(0x00800000), ScaleRule::kFloor, 0, {}, 0xc0},
    {"one infinity takes the block", {INFINITY}, 1.f, ScaleRule::kRceil, 255, {0x7f}, 0x7f},
    {"one NaN takes the block", {1.f, -NAN}, 2.f, ScaleRule::kFloor, 255, {0x7f, 0x7f}, 0x7f},
    {"NaN under ceil", {NAN}, 2.f, ScaleRule::kCeil, 255, {0x7f}, 0x7f},
    {"infinity under even", {-INFINITY}, 2.f, ScaleRule::kEven, 255, {0x7f}, 0x7f},
    {"448", {}, 448.f, ScaleRule::kRceil, 127, {}, 0x7e},
    {"-448", {}, -448.f, ScaleRule::kFloor, 127, {}, 0xfe},
    {"f32 max, floor", {}, f32(0x7f7fffff), ScaleRule::kFloor, 246, {}, 0x7e},
    {"f32 max, rceil", {}, f32(0x7f7fffff), ScaleRule::kRceil, 247, {}, 0x78},
    {"f32 max, ceil", {}, f32(0x7f7fffff), ScaleRule::kCeil, 247, {}, 0x78},
    {"f32 max, even: no scale is large enough",
     {},
     f32(0x7f7fffff),
     ScaleRule::kEven,
     255,
     {},
     0x7f},
    {"bf16 max, floor", {}, f32(0x7f7f0000), ScaleRule::kFloor, 246, {}, 0x7e},
    {"bf16 max, rceil", {}, f32(0x7f7f0000), ScaleRule::kRceil, 247, {}, 0x78},
    {"bf16's smallest subnormal", {}, f32(0x00010000), ScaleRule::kRceil, 0, {}, 0x08},
    {"f32's smallest subnormal", {}, f32(0x80000001), ScaleRule::kRceil, 0, {}, 0x80},
    {"ones with a subnormal", {f32(0x80010000)}, 1.f, ScaleRule::kRceil, 119, {0x80}, 0x78},
    {"ones with a subnormal", {f32(0x00010000)}, 1.f, ScaleRule::kFloor, 119, {0x00}, 0x78},
    {"ones beside f32 max", {f32(0x7f7fffff)}, 1.f, ScaleRule::kRceil, 247, {0x78}, 0x00},
    {"3.5 + ulp, rceil", {}, f32(0x40600001), ScaleRule::kRceil, 121, {}, 0x76},
    {"3.5 + ulp, floor", {}, f32(0x40600001), ScaleRule::kFloor, 120, {}, 0x7e},
    {"512 - ulp, floor", {}, f32(0x43ffffff), ScaleRule::kFloor, 127, {}, 0x7e},
    {"512 - ulp, rceil", {}, f32(0x43ffffff), ScaleRule::kRceil, 128, {}, 0x78},
    {"480, floor clips", {}, 480.f, ScaleRule::kFloor, 127, {}, 0x7e},
    {"480, rceil", {}, -480.f, ScaleRule::kRceil, 128, {}, 0xf7},
    {"scale byte 0 under floor is 2^-127, not 2^-126",
     {},
     f32(0x00200000),
     ScaleRule::kFloor,
     0,
     {},
     0x30},
    {"scale byte 0 under ceil", {}, f32(0x00200000), ScaleRule::kCeil, 0, {}, 0x30},
    {"scale byte 0 under even", {}, f32(0x00200000), ScaleRule::kEven, 0, {}, 0x30},
};

class OnEveryBackend : public ::testing::TestWithParam<NamedExec> {
 protected:
  const Exec& exec() const { return GetParam().exec; }

  // Runs quantize on a backend and returns the bytes of elements and scales of each form.
  template <class T>
  std::vector<std::vector<uint8_t>> run(const Exec& where, const std::vector<T>& x, Shape shape,
                                        const std::vector<int32_t>& offs, std::optional<Block> row,
                                        std::optional<Block> col,
                                        ScaleRule rule = ScaleRule::kRceil) const {
    Arena arena(where.backend);
    const auto format = std::is_same_v<T, bf16> ? Format::kBf16 : Format::kF32;
    QuantizeArgs args{.x = {arena.input(x, shape).data, format, shape}, .rule = rule};
    const std::optional<int64_t> groups = groups_of(offs);
    if (groups) args.offs = arena.input(offs, {*groups});
    const auto operand = [&](Form form, Block block) -> QuantizedOut {
      const auto s = operand_shape<int64_t>(shape, groups, form, block, ScaleLayout::kPlain);
      return {block, ScaleLayout::kPlain, arena.output<e4m3>(s.qdata), arena.output<e8m0>(s.scale)};
    };
    if (row) args.rowwise = operand(Form::kRowwise, *row);
    if (col) args.colwise = operand(Form::kColwise, *col);
    quantize(args, where);
    return arena.results();
  }
};

INSTANTIATE_TEST_SUITE_P(, OnEveryBackend, ::testing::ValuesIn([] {
                           auto all = backends_here();
                           all.insert(all.begin(), {"ref", kRef});
                           return all;
                         }()),
                         [](const auto& info) { return info.param.name; });

TEST_P(OnEveryBackend, GivesTheBytesOfTheSpecForItsVectors) {
  for (const Vector& v : kVectors) {
    std::vector<float> x(32, v.rest);
    std::copy(v.values.begin(), v.values.end(), x.begin());
    for (const bool colwise : {false, true}) {
      const auto out = run(exec(), x, colwise ? Shape{32, 1} : Shape{1, 32}, {},
                           colwise ? std::nullopt : std::optional(k1x32),
                           colwise ? std::optional(k32x1) : std::nullopt, v.rule);
      EXPECT_EQ(out[1][0], v.code) << v.name << ' ' << name(v.rule);
      for (size_t i = 0; i < 32; ++i)
        ASSERT_EQ(out[0][i], i < v.elements.size() ? v.elements[i] : v.rest_element)
            << v.name << ' ' << name(v.rule) << " element " << i;
    }
  }
}

#if defined(__x86_64__)
TEST_P(OnEveryBackend, GivesTheSameBytesInAnyFloatingPointMode) {
  std::vector<float> x(64 * 96);
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::ldexp(float(i % 97), -135 + int(i / 1000));
  const auto expected = run(exec(), x, {64, 96}, {}, k1x32, k32x1);
  constexpr unsigned kFlushAndTruncate = 0x1f80 | 0x8040 | 0x6000;
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(kFlushAndTruncate);
  const auto actual = run(exec(), x, {64, 96}, {}, k1x32, k32x1);
  const unsigned after = _mm_getcsr();
  _mm_setcsr(mode);
  EXPECT_EQ(actual, expected);
  EXPECT_EQ(after & 0xe040u, kFlushAndTruncate & 0xe040u) << "the caller's mode is not restored";
}
#endif

TEST_P(OnEveryBackend, GivesEachFormTheSameBytesWhetherAskedForAloneOrTogether) {
  const Shape shape{300, 200};
  const auto x = gaussian(numel(shape));
  const std::vector<int32_t> offs{0, 1, 129, 257, 290};
  for (const Block row : {k1x32, k1x128})
    for (const Block col : {k32x1, k32x32, k128x1, k128x32, k128x128}) {
      const auto both = run(exec(), x, shape, offs, row, col);
      const auto alone_row = run(exec(), x, shape, offs, row, std::nullopt);
      const auto alone_col = run(exec(), x, shape, offs, std::nullopt, col);
      EXPECT_EQ(both[0], alone_row[0]);
      EXPECT_EQ(both[1], alone_row[1]);
      EXPECT_EQ(both[2], alone_col[0]);
      EXPECT_EQ(both[3], alone_col[1]);
    }
}

TEST_P(OnEveryBackend, MakesTheSecondFormOfASquareBlockTheTransposeOfTheFirst) {
  const Shape shape{3, 100, 70};
  const auto x = gaussian(numel(shape));
  for (const Block block : {k32x32, k128x128}) {
    const auto out = run(exec(), x, shape, {}, block, block);
    for (int64_t g = 0; g < 3; ++g)
      for (int64_t n = 0; n < 100; ++n)
        for (int64_t k = 0; k < 70; ++k)
          ASSERT_EQ(out[0][(g * 100 + n) * 70 + k], out[2][(g * 70 + k) * 100 + n]);
  }
}

TEST_P(OnEveryBackend, NeverLetsRowsOutsideAGroupChangeIt) {
  const Shape shape{256, 96};
  const std::vector<int32_t> offs{0, 33, 33, 161, 200};  // rows 200 to 255 are in no group
  auto x = gaussian(numel(shape));
  const auto before = run(exec(), x, shape, offs, k1x32, k128x32);
  for (int64_t i = 200 * 96; i < numel(shape); ++i) x[i] = {0x7fc0};  // NaN past the last end
  const auto after = run(exec(), x, shape, offs, k1x32, k128x32);
  EXPECT_EQ(before, after);
  for (int64_t i = 200 * 96; i < numel(shape); ++i) ASSERT_EQ(after[0][i], 0);
}

TEST_P(OnEveryBackend, KeepsNanInItsRowAndInItsGroup) {
  const Shape shape{128, 64};
  const std::vector<int32_t> offs{40, 128};
  auto x = gaussian(numel(shape));
  x[50 * 64 + 3] = {0x7f80};  // infinity in row 50, group 1
  const auto out = run(exec(), x, shape, offs, k1x32, k32x1);
  for (int64_t row = 0; row < 128; ++row)
    for (int64_t col = 0; col < 64; ++col)
      EXPECT_EQ(out[0][row * 64 + col] == 0x7f, row == 50 && col < 32);
  // Colwise, group 0 is padded to 64 rows. So row 50, in group 1, falls into the block that begins
  // at 64, and only column 3 of that block becomes NaN.
  const int64_t padded = padded_rows<int64_t>(128, 2, 32);
  for (int64_t col = 0; col < 64; ++col)
    for (int64_t k = 0; k < padded; ++k)
      EXPECT_EQ(out[2][col * padded + k] == 0x7f, col == 3 && k >= 64 && k < 96);
}

TEST_P(OnEveryBackend, PadsAGroupsTailWithZeros) {
  const Shape shape{5, 3};
  const auto out = run(exec(), std::vector<float>(15, 1.f), shape, {2, 2, 5}, std::nullopt, k32x1);
  const int64_t padded = padded_rows<int64_t>(5, 3, 32);
  ASSERT_EQ(padded, 256);  // three blocks of 32 are 96, rounded up to 256: whole lines of memory
  for (int64_t col = 0; col < 3; ++col)
    for (int64_t k = 0; k < padded; ++k)
      EXPECT_EQ(out[0][col * padded + k], k < 2 || (k >= 32 && k < 35) ? 0x78 : 0);
}

TEST_P(OnEveryBackend, HandlesNothingAtAll) {
  for (const Shape shape : {Shape{0, 64}, Shape{64, 0}, Shape{0, 0}}) {
    const auto out = run(exec(), std::vector<bf16>{}, shape, {0, 0, 0}, k1x32, k32x1);
    for (const auto& bytes : out)
      for (const uint8_t byte : bytes) EXPECT_EQ(byte, 0);
  }
}

// ---- relations between ops ---------------------------------------------------------------------

TEST(Quantize, QuantizesEachMatrixOfWeightsOnItsOwn) {
  const Shape shape{4, 50, 90};
  const auto x = gaussian(numel(shape));
  for (const Block block : {k1x32, k32x32, k1x128, k128x32, k128x128}) {
    const auto all = quantize_form(x, shape, Form::kRowwise, block);
    for (int64_t g = 0; g < 4; ++g) {
      const std::vector<bf16> one(x.begin() + g * 4500, x.begin() + (g + 1) * 4500);
      const auto alone = quantize_form(one, {50, 90}, Form::kRowwise, block);
      EXPECT_TRUE(std::equal(alone.qdata.begin(), alone.qdata.end(), all.qdata.begin() + g * 4500));
      EXPECT_TRUE(std::equal(alone.scale.begin(), alone.scale.end(),
                             all.scale.begin() + g * static_cast<int64_t>(alone.scale.size())));
    }
  }
}

TEST(Quantize, QuantizesEachGroupOnItsOwn) {
  const Shape shape{300, 40};
  const auto x = gaussian(numel(shape));
  const std::vector<int32_t> offs{0, 128, 129, 129, 300};
  const auto all = quantize_form(x, shape, Form::kColwise, k128x32, offs);
  int64_t begin = 0, padded = 0;
  for (const int64_t end : offs) {
    const std::vector<bf16> rows(x.begin() + begin * 40, x.begin() + end * 40);
    const auto alone = quantize_form(rows, {end - begin, 40}, Form::kColwise, k128x32);
    const int64_t width = round_up<int64_t>(end - begin, 128);
    ASSERT_EQ(alone.qdata_shape, Shape(40, width));
    for (int64_t c = 0; c < 40; ++c)
      for (int64_t k = 0; k < width; ++k) ASSERT_EQ(alone.q(c, k), all.q(c, padded + k));
    for (int64_t c = 0; c < 2; ++c)
      for (int64_t k = 0; k < width / 128; ++k)
        ASSERT_EQ(alone.s(c, k), all.s(c, padded / 128 + k));
    begin = end, padded += width;
  }
}

TEST(Quantize, ErrsByAtMostOneSixteenthOfAnElementsMagnitudeUnderRceil) {
  // Nothing clips under rceil, so the error is that of rounding to e4m3: at most 2^-4 of the value
  // (half an ulp of 3 mantissa bits), or for tiny values 2^-10 times the scale (half the smallest
  // step).
  const Shape shape{64, 256};
  const auto x = gaussian(numel(shape), 7);
  for (const Block block : {k1x32, k1x128}) {
    const auto q = quantize_form(x, shape, Form::kRowwise, block);
    std::vector<float> back(numel(shape));
    dequantize({.form = Form::kRowwise,
                .block = block,
                .qdata = {q.qdata.data(), q.qdata_shape},
                .scale = {q.scale.data(), q.scale_shape},
                .x = {back.data(), Format::kF32, shape}},
               kRef);
    for (int64_t i = 0; i < numel(shape); ++i) {
      const float value = to_float(x[i]);
      const float scale = to_float(q.s(i / 256, i % 256 / block.cols));
      ASSERT_LE(std::abs(back[i] - value), std::max(std::abs(value) / 16, scale * 0x1p-10f));
    }
  }
}

}  // namespace
}  // namespace moxie::testing
