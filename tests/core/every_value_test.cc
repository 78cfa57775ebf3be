// Converts all values to and from e4m3 on every backend. Backends use different instructions or
// integer code for this, and a sample of values could miss one that they convert differently.
#include <gtest/gtest.h>

#include <bit>

#include "moxie/core/dequantize/dequantize.h"
#include "moxie/core/quantize/quantize.h"
#include "moxie/core/requantize/requantize.h"
#include "tests/support/arena.h"
#include "tests/support/backends.h"

namespace moxie::testing {
namespace {

constexpr Block k1x32{1, 32}, k32x1{32, 1};
const Exec kRef{.backend = Backend::kRef};

class Conversion : public ::testing::TestWithParam<NamedExec> {
 protected:
  const Exec& exec() const { return GetParam().exec; }
};

INSTANTIATE_TEST_SUITE_P(, Conversion, ::testing::ValuesIn(backends_here()),
                         [](const auto& info) { return info.param.name; });

// The diagonal of each 32 x 32 square holds the largest float below 512, so the floor rule gives
// every block, rowwise and colwise, the scale 1: elements are encoded unscaled, and those above 448
// saturate. Elements of 512 times the scale or more do not occur in any block.
TEST_P(Conversion, EncodesEveryFloatAsTheFormatSays) {
  constexpr int64_t kSide = 2048;
  constexpr uint32_t kEnd = 0x44000000, kLast = kEnd - 1;  // 512 and the float before it
  // A GPU converts all values. On a CPU format_test does that with the scalar code; here every
  // 1009th value shows that the vector code agrees.
  const uint64_t stride = exec().backend == Backend::kCuda ? 1 : 1009;
  uint64_t next = 0;
  while (next < 2 * uint64_t{kEnd}) {
    std::vector<float> x(kSide * kSide, std::bit_cast<float>(kLast));
    for (int64_t row = 0; row < kSide; ++row)
      for (int64_t col = 0; col < kSide; ++col) {
        if (row % 32 == col % 32 || next >= 2 * uint64_t{kEnd}) continue;
        const auto bits = static_cast<uint32_t>(next / 2 | next % 2 << 31);  // of both signs
        x[row * kSide + col] = std::bit_cast<float>(bits);
        next += stride;
      }
    Arena arena(exec().backend);
    const Shape shape{kSide, kSide};
    const auto operand = [&](Form form, Block block) -> QuantizedOut {
      const auto s = operand_shape<int64_t>(shape, std::nullopt, form, block, ScaleLayout::kPlain);
      return {block, ScaleLayout::kPlain, arena.output<e4m3>(s.qdata), arena.output<e8m0>(s.scale)};
    };
    quantize({.x = {arena.input(x, shape).data, Format::kF32, shape},
              .rowwise = operand(Form::kRowwise, k1x32),
              .colwise = operand(Form::kColwise, k32x1),
              .rule = ScaleRule::kFloor},
             exec());
    const auto out = arena.results();
    for (int64_t row = 0; row < kSide; ++row)
      for (int64_t col = 0; col < kSide; ++col) {
        const float value = x[row * kSide + col];
        const uint8_t expected = to_e4m3(value).bits;
        const uint8_t rowwise = out[0][row * kSide + col], colwise = out[2][col * kSide + row];
        if (rowwise == expected && colwise == expected) continue;  // billions of macros are slow
        FAIL() << value << " is " << int{expected} << ", and not " << int{rowwise}
               << " or, colwise, " << int{colwise};
      }
    for (const size_t scales : {1, 3})
      for (const uint8_t code : out[scales]) ASSERT_EQ(code, 127);
  }
}

// Each row holds all 256 bytes. All scales of row r are 2^(r - 127); those of row 255 are NaN.
TEST_P(Conversion, DecodesEveryByteWithEveryScaleAsTheReference) {
  const Shape shape{256, 256};
  std::vector<e4m3> bytes(256 * 256);
  std::vector<e8m0> codes(256 * 8);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i].bits = static_cast<uint8_t>(i);
  for (size_t i = 0; i < codes.size(); ++i) codes[i].code = static_cast<uint8_t>(i / 8);
  for (const Format format : {Format::kBf16, Format::kF32})
    for (const int misalign : {0, 1}) {
      const auto run = [&](const Exec& where) {
        Arena arena(where.backend, misalign);
        dequantize({.form = Form::kRowwise,
                    .block = k1x32,
                    .qdata = arena.input(bytes, shape),
                    .scale = arena.input(codes, {256, 8}),
                    .x = arena.float_output(format, shape)},
                   where);
        return arena.results();
      };
      ASSERT_EQ(run(exec()), run(kRef));
    }
}

// Column c holds byte c in all rows, and within each block of 32 rows a row's scale is half of the
// previous row's. The second 256 columns repeat the first, except that row 0 of each block holds
// 448: it sets the scale of the requantized column, so smaller values lose bits.
TEST_P(Conversion, RequantizesEveryByteAtEveryDistanceOfScalesAsTheReference) {
  constexpr int64_t kRows = 128, kCols = 512;
  const Shape shape{kRows, kCols};
  std::vector<e4m3> bytes(kRows * kCols);
  std::vector<e8m0> codes(kRows * kCols / 32);
  for (int64_t row = 0; row < kRows; ++row)
    for (int64_t col = 0; col < kCols; ++col) {
      const bool largest = col >= 256 && row % 32 == 0;
      bytes[row * kCols + col].bits = static_cast<uint8_t>(largest ? 0x7e : col);
      // Scale codes of the first 32 rows are 36 down to 5, close to the smallest; of the others,
      // 200 down to 169.
      codes[(row * kCols + col) / 32].code = static_cast<uint8_t>((row < 32 ? 36 : 200) - row % 32);
    }
  for (const ScaleRule rule : {ScaleRule::kRceil, ScaleRule::kFloor})
    for (const Block block : {k32x1, Block{128, 1}, Block{32, 32}})
      for (const int misalign : {0, 1}) {
        const auto run = [&](const Exec& where) {
          Arena arena(where.backend, misalign);
          const auto s = operand_shape<int64_t>(shape, std::nullopt, Form::kColwise, block,
                                                ScaleLayout::kPlain);
          requantize({.block = k1x32,
                      .qdata = arena.input(bytes, shape),
                      .scale = arena.input(codes, {kRows, kCols / 32}),
                      .colwise = {block, ScaleLayout::kPlain, arena.output<e4m3>(s.qdata),
                                  arena.output<e8m0>(s.scale)},
                      .rule = rule},
                     where);
          return arena.results();
        };
        ASSERT_EQ(run(exec()), run(kRef)) << name(block) << ", misaligned by " << misalign;
      }
}

}  // namespace
}  // namespace moxie::testing
