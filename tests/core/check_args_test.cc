// Ops refuse bad arguments before they write anything, with an error that names the op, the rule
// and the value.
#include "moxie/core/base/check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "moxie/core/dequantize/dequantize.h"
#include "moxie/core/groups/groups.h"
#include "moxie/core/layout/parse.h"
#include "moxie/core/quantize/quantize.h"
#include "moxie/core/requantize/requantize.h"
#include "moxie/core/row_scale/row_scale.h"
#include "moxie/core/scale_layout/scale_layout.h"
#include "tests/support/tensors.h"

namespace moxie::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr Block k1x32{1, 32}, k32x1{32, 1}, k32x32{32, 32};

#define EXPECT_REFUSED(call, message) \
  EXPECT_THAT([&] { call; }, ThrowsMessage<Error>(HasSubstr(message)))

// The arguments of a valid call of quantize. Each test makes one of them invalid.
struct Call {
  Shape shape{8, 64};
  std::vector<float> x = std::vector<float>(512, 1.f);
  std::vector<int32_t> offs{3, 8};
  Quantized row{shape, 2, Form::kRowwise, k1x32};
  Quantized col{shape, 2, Form::kColwise, k32x1};
  QuantizeArgs args{.x = view_of(x, shape),
                    .offs = view_of(offs),
                    .rowwise = row.operand(),
                    .colwise = col.operand()};

  void run() { quantize(args, {.backend = Backend::kCpu}); }
  bool untouched() const {
    return row.qdata == std::vector<e4m3>(row.qdata.size(), e4m3{0xa5}) &&
           col.qdata == std::vector<e4m3>(col.qdata.size(), e4m3{0xa5}) &&
           row.scale == std::vector<e8m0>(row.scale.size(), e8m0{0xa5}) &&
           col.scale == std::vector<e8m0>(col.scale.size(), e8m0{0xa5});
  }
};

TEST(Check, AcceptsTheRightCall) { EXPECT_NO_THROW(Call().run()); }

TEST(Check, RefusesOffsThatDecrease) {
  Call call;
  call.offs[1] = 2;
  EXPECT_REFUSED(
      call.run(),
      "quantize: offs must not decrease and start at 0 or above, got 2 after 3 at group 1");
  EXPECT_TRUE(call.untouched());
}

TEST(Check, RefusesOffsThatStartBelowZero) {
  Call call;
  call.offs[0] = -1;
  EXPECT_REFUSED(call.run(), "got -1 after 0 at group 0");
  EXPECT_TRUE(call.untouched());
}

TEST(Check, RefusesOffsPastTheLastRow) {
  Call call;
  call.offs[1] = 9;
  EXPECT_REFUSED(call.run(), "offs must not pass the end of the 8 rows, got 9 at group 1");
  EXPECT_TRUE(call.untouched());
}

TEST(Check, RefusesMoreThan1024Groups) {
  Call call;
  call.offs.assign(1025, 8);
  call.args.offs = view_of(call.offs);
  EXPECT_REFUSED(call.run(), "offs must hold 1 to 1024 groups, got 1025");
}

TEST(Check, RefusesOffsForWeights) {
  Call call;
  call.args.x.shape = {2, 4, 64};
  EXPECT_REFUSED(call.run(), "offs must be absent for weights [2, 4, 64]");
}

TEST(Check, RefusesShapesThatAreNeitherTokensNorWeights) {
  Call call;
  call.args.x.shape = {512};
  EXPECT_REFUSED(call.run(),
                 "x must be tokens [rows, cols] or weights [groups, rows, cols], got [512]");
}

TEST(Check, RefusesACallWithoutAResult) {
  Call call;
  call.args.rowwise = call.args.colwise = std::nullopt;
  EXPECT_REFUSED(call.run(), "at least one of the forms");
}

TEST(Check, RefusesABlockThatIsNoOperandOfItsForm) {
  Call call;
  call.args.rowwise->block = k32x1;
  EXPECT_REFUSED(
      call.run(),
      "the rowwise form contracts columns, so its block must span at least 32 of them, got 32x1");
  EXPECT_TRUE(call.untouched());
}

TEST(Check, RefusesATallRowwiseBlockOnGroups) {
  Call call;
  call.args.rowwise->block = k32x32;
  EXPECT_REFUSED(call.run(),
                 "with offs a rowwise block must be one row tall (1x32 or 1x128), got 32x32");
}

TEST(Check, RefusesAnUnsupportedBlock) {
  Call call;
  call.args.rowwise->block = {1, 64};
  EXPECT_REFUSED(call.run(), "block must be one of the supported blocks, got 1x64");
}

TEST(Check, RefusesANegativeSize) {
  Call call;
  call.args.x.shape = {-8, 64};
  EXPECT_REFUSED(call.run(), "quantize: sizes must not be negative, got [-8, 64]");
  EXPECT_TRUE(call.untouched());
}

TEST(Check, RefusesAResultOfTheWrongShape) {
  Call call;
  call.args.colwise->qdata.shape = {64, 32};
  EXPECT_REFUSED(call.run(), "qdata_t must be [64, 256], got [64, 32]");
  EXPECT_TRUE(call.untouched());
}

TEST(Check, RefusesAnInstructionSetThisMachineLacks) {
  if (best_isa() == Isa::kAvx512)
    GTEST_SKIP() << "every instruction set runs on this machine, so none can be refused";
  Call call;
  EXPECT_REFUSED(quantize(call.args, {.isa = Isa::kAvx512}), "quantize");
}

TEST(Check, SaysThatABuildHasNoCuda) {
  if (kHasCuda) GTEST_SKIP() << "this build has CUDA";
  Call call;
  EXPECT_REFUSED(quantize(call.args, {.backend = Backend::kCuda}),
                 "quantize: this build of Moxie has no CUDA backend");
}

TEST(Check, NamesEveryOpInItsOwnErrors) {
  const Shape shape{4};
  const Exec exec{.backend = Backend::kRef};
  EXPECT_REFUSED(dequantize({.qdata = {}, .scale = {}, .x = {nullptr, Format::kF32, shape}}, exec),
                 "dequantize: x");
  EXPECT_REFUSED(requantize({.block = k1x32, .qdata = {nullptr, shape}, .scale = {}}, exec),
                 "requantize: x");
  EXPECT_REFUSED(quantize_row_scale({.x = {}}, exec), "quantize_row_scale: at least one");
  EXPECT_REFUSED(
      pad_groups({.x = {nullptr, shape}, .offs = {}, .padded = {}, .starts = {}, .ends = {}}, exec),
      "pad_groups: x must be [rows, cols], got [4]");
  EXPECT_REFUSED(swizzle_scale({.plain = {nullptr, shape}, .swizzled = {}}, exec),
                 "swizzle_scale: plain scales");
}

TEST(Check, RefusesPaddingByLessThanOne) {
  const std::vector<int32_t> offs{1};
  std::vector<int32_t> out(1);
  EXPECT_REFUSED(
      padded_offs({.offs = {offs.data(), {1}}, .alignment = 0, .padded = {out.data(), {1}}}, {}),
      "padded_offs: alignment must be 1 to");
}

TEST(Check, RefusesRowsWhosePaddedEndsLeaveInt32) {
  const std::vector<int32_t> offs{1};
  std::vector<int32_t> out(1);
  const auto pad = [&](int64_t rows) {
    padded_offs({.offs = {offs.data(), {1}}, .rows = rows, .padded = {out.data(), {1}}}, {});
  };
  EXPECT_REFUSED(pad(-1), "padded_offs: rows must be 0 to");
  EXPECT_REFUSED(pad(most_rows(32) + 1), "got " + std::to_string(most_rows(32) + 1));
  EXPECT_REFUSED(pad(0), "padded_offs: offs");
  pad(most_rows(32));
}

TEST(Check, RefusesToUnpadFromOutsideTheBuffer) {
  const std::vector<std::byte> padded(64);
  std::vector<std::byte> x(6);
  const std::vector<int32_t> offs{3}, starts{30};
  EXPECT_REFUSED(unpad_groups({.padded = {padded.data(), {32, 2}},
                               .offs = {offs.data(), {1}},
                               .starts = {starts.data(), {1}},
                               .x = {x.data(), {3, 2}}},
                              {}),
                 "group 0 must lie inside the 32 padded rows, got start 30 for 3 rows");
}

TEST(Check, RefusesToCompactScalesThatDifferInsideABlock) {
  std::vector<e8m0> replicated(8, e8m0{7}), compact(2);
  replicated[6].code = 9;
  EXPECT_REFUSED(
      compact_scale({.form = Form::kRowwise,
                     .block = {1, 128},
                     .replicated = {replicated.data(), {2, 4}},
                     .compact = {compact.data(), {2, 1}}},
                    {}),
      "scales must be constant in each 1x128 block, got code 9 beside 7 at row 1, column 2");
}

TEST(CheckLayout, RefusesQuadsOfBlocksThatAreNot128AlongK) {
  check_layout("quantize", Form::kRowwise, {1, 128}, ScaleLayout::kQuads);
  check_layout("quantize", Form::kColwise, {128, 32}, ScaleLayout::kQuads);
  check_layout("quantize", Form::kRowwise, {1, 32}, ScaleLayout::kSwizzled);
  EXPECT_REFUSED(check_layout("quantize", Form::kRowwise, {1, 32}, ScaleLayout::kQuads),
                 "quantize: scales in quads need blocks of 128 columns in the rowwise form, got "
                 "1x32");
  EXPECT_REFUSED(check_layout("quantize", Form::kColwise, {32, 1}, ScaleLayout::kQuads),
                 "quantize: scales in quads need blocks of 128 rows in the colwise form, got "
                 "32x1");
}

TEST(Parse, KnowsEveryNameAndListsThemOtherwise) {
  for (const Block block : kBlocks) EXPECT_EQ(parse_block(name(block), "op", "block"), block);
  EXPECT_REFUSED(parse_block("32", "quantize_rowwise", "block"),
                 "quantize_rowwise: block must be one of 1x32, 32x1, 32x32, 1x128, 128x1, 128x32, "
                 "128x128, got '32'");
  EXPECT_EQ(parse_rule("rceil", "op"), ScaleRule::kRceil);
  EXPECT_EQ(parse_rule("even", "op"), ScaleRule::kEven);
  EXPECT_REFUSED(parse_rule("RCEIL", "op"),
                 "op: rule must be one of rceil, floor, ceil, even, got 'RCEIL'");
  EXPECT_EQ(parse_layout("swizzled", "op"), ScaleLayout::kSwizzled);
  EXPECT_EQ(parse_layout("quads", "op"), ScaleLayout::kQuads);
  EXPECT_REFUSED(parse_layout("blocked", "op"),
                 "op: scale_layout must be plain, swizzled or quads, got 'blocked'");
  EXPECT_REFUSED(parse_layout("blocked", "op", "from_layout"),
                 "op: from_layout must be plain, swizzled or quads, got 'blocked'");
}

}  // namespace
}  // namespace moxie::testing
