#include "moxie/core/cost/cost.h"

#include <gtest/gtest.h>

namespace moxie {
namespace {

TEST(Cost, OfQuantizeCountsEachTensorOnce) {
  // quantize reads 128 x 64 values in bf16; it writes one byte per element, and one per scale: two
  // scales in each row of 64.
  const Cost rowwise = quantize_cost({.x = {128, 64}, .rowwise = Block{1, 32}});
  EXPECT_EQ(rowwise.bytes_read, 128 * 64 * 2);
  EXPECT_EQ(rowwise.bytes_written, 128 * 64 + 128 * 2);
  const Cost both =
      quantize_cost({.x = {128, 64}, .rowwise = Block{1, 32}, .colwise = Block{128, 32}});
  EXPECT_EQ(both.bytes_read, rowwise.bytes_read) << "both forms come from one read";
  EXPECT_EQ(both.bytes_written, rowwise.bytes_written + 64 * 128 + 2 * 1);
}

TEST(Cost, OfRaggedGroupsCountsThePaddedBuffer) {
  const Cost cost = quantize_cost({.x = {100, 10}, .num_groups = 4, .colwise = Block{32, 1}});
  const int64_t padded = padded_rows<int64_t>(100, 4, 32);
  EXPECT_EQ(cost.bytes_written, static_cast<double>(10 * padded + 10 * padded / 32));
}

TEST(Cost, OfPaddingCountsTheRowsReadAndTheBufferWritten) {
  const Cost cost = pad_groups_cost(100, 6, 4, 32);
  EXPECT_EQ(cost.bytes_read, 600);
  EXPECT_EQ(cost.bytes_written, 6. * 256);  // round_up(100 + 4 * 32, 32)
  EXPECT_EQ(unpad_groups_cost(100, 6).bytes(), 1200);
}

TEST(Cost, OfTheOtherOpsFollowsTheirShapes) {
  const Shape x{8, 64};
  EXPECT_EQ(dequantize_cost(x, Format::kF32, Form::kRowwise, {1, 32}, std::nullopt).bytes(),
            512 + 16 + 512 * 4);
  EXPECT_EQ(dequantize_cost(x, Format::kF32, Form::kRowwise, {1, 32}, std::nullopt,
                            ScaleLayout::kSwizzled)
                .bytes(),
            512 + 128 * 4 + 512 * 4);
  EXPECT_EQ(requantize_cost({.x = x}).bytes(), 512 + 16 + 64 * 32 + 64);
  EXPECT_EQ(requantize_cost({.x = x, .layout = ScaleLayout::kSwizzled}).bytes(),
            512 + 16 + 64 * 32 + 128 * 4);
  EXPECT_EQ(requantize_cost({.x = x, .from_layout = ScaleLayout::kSwizzled}).bytes(),
            512 + 128 * 4 + 64 * 32 + 64);
  EXPECT_EQ(row_scale_cost(x, Format::kBf16, Form::kRowwise, std::nullopt).bytes(),
            1024 + 512 + 4 * 8);
  EXPECT_EQ(swizzle_cost({8, 2}, {128, 4}).bytes(), 16 + 512);
  EXPECT_EQ(grouped_mm_flops(10, 20, 30), 12'000);
}

}  // namespace
}  // namespace moxie
