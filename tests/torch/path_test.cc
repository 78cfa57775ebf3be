// Which kernels a recipe takes on GPUs that need not be here.
#include "moxie/torch/gemm/path.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace moxie::ops {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

constexpr int kAmpere = 80, kAda = 89, kHopper = 90, kBlackwell = 100, kConsumerBlackwell = 120;

Choice choose(std::string_view recipe, int capability, int64_t n = 2048, int64_t k = 7168) {
  return choose_path_on_gpu(parse_recipe(recipe, "test"), capability, n, k);
}

TEST(ChoosePath, HopperHasAKernelForBlocksOf128AndOneForRows) {
  EXPECT_EQ(choose("mxfp8_rceil_128", kHopper).path, Path::kSm90);
  EXPECT_EQ(choose("fp8_rowwise", kHopper).path, Path::kSm90Rows);
  EXPECT_EQ(choose("fp8_rowwise:out=float32", kHopper).path, Path::kSm90Rows);
  const Choice by_32 = choose("mxfp8_rceil", kHopper);
  EXPECT_EQ(by_32.path, Path::kEmulated);
  EXPECT_THAT(by_32.reason, HasSubstr("mxfp8_rceil_128 is the recipe for it"));
}

TEST(ChoosePath, BlackwellMultipliesBlocksAndEmulatesRows) {
  EXPECT_EQ(choose("mxfp8_rceil_128", kBlackwell).path, Path::kSm100);
  EXPECT_EQ(choose("mxfp8_rceil", kBlackwell).path, Path::kSm100);
  const Choice by_row = choose("fp8_rowwise", kBlackwell);
  EXPECT_EQ(by_row.path, Path::kEmulated);
  EXPECT_THAT(by_row.reason, HasSubstr("is one for Hopper"));
}

TEST(ChoosePath, ARowHasWholeSixteens) {
  for (const char* recipe : {"mxfp8_rceil_128", "fp8_rowwise"}) {
    EXPECT_THAT(choose(recipe, kHopper, 16, 16).reason, IsEmpty());
    EXPECT_THAT(choose(recipe, kHopper, 24, 64).reason,
                HasSubstr("take multiples of 16, got n = 24 and k = 64"));
    EXPECT_EQ(choose(recipe, kHopper, 64, 40).path, Path::kEmulated);
    EXPECT_EQ(choose(recipe, kHopper, 64, 0).path, Path::kEmulated);
  }
  EXPECT_THAT(choose("mxfp8_rceil", kBlackwell, 64, 48).reason,
              HasSubstr("take multiples of 32, got n = 64 and k = 48"));
}

TEST(ChoosePath, OtherGpusEmulate) {
  for (const int capability : {kAmpere, kAda, kConsumerBlackwell})
    for (const std::string& recipe : recipe_names())
      EXPECT_EQ(choose(recipe, capability).path, Path::kEmulated) << recipe << " on " << capability;
  EXPECT_THAT(choose("fp8_rowwise", kAda).reason, HasSubstr("compute capability 8.9"));
}

TEST(ChoosePath, ARecipeThatAsksForEmulationGetsIt) {
  for (const int capability : {kHopper, kBlackwell}) {
    EXPECT_EQ(choose("fp8_rowwise:kernels=emulated", capability).reason, "the recipe asks for it");
    EXPECT_EQ(choose("bf16", capability).reason, "the recipe quantizes nothing");
  }
}

TEST(ChoosePath, EveryRecipeHasAReasonUnlessItIsFast) {
  for (const int capability : {kAmpere, kHopper, kBlackwell})
    for (const std::string& recipe : recipe_names()) {
      const Choice choice = choose(recipe, capability);
      EXPECT_EQ(choice.reason.empty(), choice.path != Path::kEmulated) << recipe;
    }
}

ScaleLayout layout(std::string_view recipe, Path path, c10::DeviceType device) {
  return choose_layout(parse_recipe(recipe, "test"), path, device);
}

TEST(ChooseLayout, OnAGpuWhatIsDecodedHasSwizzledScalesInBlocksOf32) {
  for (const char* recipe : {"mxfp8_rceil", "mxfp8_floor", "mxfp8_emulated_even",
                             "mxfp8_rceil_32x32", "mxfp8_rceil_wgrad_with_hp"}) {
    EXPECT_EQ(layout(recipe, Path::kEmulated, c10::kCUDA), ScaleLayout::kSwizzled) << recipe;
    EXPECT_EQ(layout(recipe, Path::kEmulated, c10::kCPU), ScaleLayout::kPlain) << recipe;
  }
  for (const char* recipe : {"mxfp8_rceil_128", "mxfp8_rceil:activations=1x128", "fp8_rowwise",
                             "mxfp8_rceil:wgrad_dy=128x1,wgrad_x=128x1", "bf16"})
    EXPECT_EQ(layout(recipe, Path::kEmulated, c10::kCUDA), ScaleLayout::kPlain) << recipe;
}

TEST(ChooseLayout, AGemmHasItsOwn) {
  EXPECT_EQ(layout("mxfp8_rceil_128", Path::kSm90, c10::kCUDA), ScaleLayout::kQuads);
  EXPECT_EQ(layout("mxfp8_rceil_128:wgrad_dy=32x1,wgrad_x=32x1", Path::kSm90, c10::kCUDA),
            ScaleLayout::kPlain);
  EXPECT_EQ(layout("mxfp8_rceil_128:weights=128x32", Path::kSm90, c10::kCUDA), ScaleLayout::kPlain);
  EXPECT_EQ(layout("fp8_rowwise", Path::kSm90Rows, c10::kCUDA), ScaleLayout::kPlain);
  for (const char* recipe : {"mxfp8_rceil", "mxfp8_rceil_128"})
    EXPECT_EQ(layout(recipe, Path::kSm100, c10::kCUDA), ScaleLayout::kSwizzled) << recipe;
}

constexpr RowScaledPass kTaken{.rows = 100, .groups = 8, .result = at::kBFloat16, .aligned = true};

TEST(WhyNotSm90Rows, NothingIfResultsAreBf16) {
  EXPECT_THAT(why_not_sm90_rows(kTaken), IsEmpty());
  RowScaledPass pass = kTaken;
  pass.result = at::kFloat;
  EXPECT_THAT(why_not_sm90_rows(pass), HasSubstr("rounded twice"));
}

TEST(WhyNotSm90Rows, NamesWhatTorchDoesNotTake) {
  RowScaledPass pass = kTaken;
  pass.groups = 1023;
  EXPECT_THAT(why_not_sm90_rows(pass), IsEmpty());
  pass.groups = 1024;
  EXPECT_THAT(why_not_sm90_rows(pass), HasSubstr("at most 1023 groups, got 1024"));
  pass = kTaken;
  pass.aligned = false;
  EXPECT_THAT(why_not_sm90_rows(pass), HasSubstr("multiple of 16 bytes"));
  pass = kTaken;
  pass.rows = 0;
  EXPECT_THAT(why_not_sm90_rows(pass), HasSubstr("nothing to multiply"));
}

}  // namespace
}  // namespace moxie::ops
