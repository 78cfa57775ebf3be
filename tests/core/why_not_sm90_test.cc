// Which problems the Hopper GEMMs refuse, and the reasons that they give. Needs no GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "moxie/core/gemm/grouped_mm.h"
#include "moxie/core/gemm/grouped_wgrad.h"

namespace moxie {
namespace {

using ::testing::HasSubstr;

GemmOperand shaped(Shape qdata, int outer_block, int k_block = 128) {
  GemmOperand operand;
  operand.qdata.shape = qdata;
  operand.outer_block = outer_block, operand.k_block = k_block;
  operand.layout = ScaleLayout::kQuads;
  return operand;
}

TEST(WhyNotSm90, HasNothingAgainstTheRecipeOfTheKernel) {
  EXPECT_EQ(why_not_sm90(GroupedMmArgs{.a = shaped({100, 144}, 1), .b = shaped({2, 48, 144}, 128)}),
            "");
  EXPECT_EQ(why_not_sm90(GroupedWgradArgs{.a = shaped({48, 256}, 1), .b = shaped({144, 256}, 32)}),
            "");
}

TEST(WhyNotSm90, SaysWhichRuleOfGroupedMmIsBroken) {
  const auto why = [](GemmOperand a, GemmOperand b) {
    return why_not_sm90(GroupedMmArgs{.a = a, .b = b});
  };
  EXPECT_THAT(why(shaped({8, 128}, 1, 32), shaped({1, 16, 128}, 128)),
              HasSubstr("needs a in blocks of 1 x 128 (outer x k), got 1 x 32"));
  EXPECT_THAT(why(shaped({8, 128}, 1), shaped({1, 16, 128}, 32)),
              HasSubstr("needs b in blocks of 128 x 128 (outer x k), got 32 x 128"));
  EXPECT_THAT(why(shaped({8, 128}, 1), shaped({1, 24, 128}, 128)),
              HasSubstr("n to be a multiple of 16, got 24"));
  EXPECT_THAT(why(shaped({8, 100}, 1), shaped({1, 16, 100}, 128)),
              HasSubstr("k to be a multiple of 16, got 100"));
  EXPECT_THAT(why(shaped({8, 0}, 1), shaped({1, 16, 0}, 128)),
              HasSubstr("k to be a multiple of 16, got 0"));
  EXPECT_THAT(why(shaped({1, int64_t{1} << 31}, 1), shaped({1, 16, int64_t{1} << 31}, 128)),
              HasSubstr("fewer than 2^31 - 1024 of k, got 2147483648"));
  EXPECT_THAT(why(shaped({1, 128}, 1), shaped({1, int64_t{1} << 30, 128}, 128)),
              HasSubstr("fewer than 2^30 - 1024 columns of the result, got 1073741824"));
  GemmOperand odd = shaped({8, 128}, 1);
  odd.qdata.data = reinterpret_cast<const e4m3*>(8);
  EXPECT_THAT(why(odd, shaped({1, 16, 128}, 128)), HasSubstr("a to start at a multiple of 16"));
  GemmOperand plain = shaped({8, 128}, 1);
  plain.layout = ScaleLayout::kPlain;
  EXPECT_THAT(why(plain, shaped({1, 16, 128}, 128)),
              HasSubstr("needs the scales of a in quads, got plain ones"));
  GemmOperand odd_scales = shaped({1, 16, 128}, 128);
  odd_scales.scale.data = reinterpret_cast<const e8m0*>(6);
  EXPECT_THAT(why(shaped({8, 128}, 1), odd_scales),
              HasSubstr("needs the scales of b to start at a multiple of 4 bytes"));
}

TEST(WhyNotSm90, SaysWhichRuleOfGroupedWgradIsBroken) {
  const auto why = [](GemmOperand a, GemmOperand b) {
    return why_not_sm90(GroupedWgradArgs{.a = a, .b = b});
  };
  EXPECT_THAT(why(shaped({16, 128}, 1), shaped({16, 128}, 1)),
              HasSubstr("needs b in blocks of 32 x 128 (outer x k), got 1 x 128"));
  EXPECT_THAT(why(shaped({24, 128}, 1), shaped({16, 128}, 32)),
              HasSubstr("n to be a multiple of 16, got 24"));
  EXPECT_THAT(why(shaped({16, 128}, 1), shaped({8, 128}, 32)),
              HasSubstr("k to be a multiple of 16, got 8"));
  EXPECT_THAT(why(shaped({16, 128}, 1), shaped({int64_t{1} << 30, 128}, 32)),
              HasSubstr("fewer than 2^30 - 1024 columns of the result, got 1073741824"));
}

}  // namespace
}  // namespace moxie
