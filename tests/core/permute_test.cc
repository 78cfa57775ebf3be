// The contracts of permute and unpermute. fuzz_test compares their backends; fused_test tests
// permute_quantize.
#include "moxie/core/permute/permute.h"

#include <gtest/gtest.h>

#include <vector>

#include "tests/support/tensors.h"

namespace moxie::testing {
namespace {

const Exec kRef{.backend = Backend::kRef};

// Two tokens x [2, 2] with two slots each: row r is the token of slot kSlotOf[r].
const std::vector<float> kX{1, 2, 10, 20};
const std::vector<int32_t> kSlotOf{2, 0, 3, 1}, kRowOf{1, 3, 0, 2};
const std::vector<float> kWeights{0.5f, 0.25f, 2, 4};

TEST(Permute, GivesEachRowTheTokenOfItsSlotTimesTheWeightOfThatSlot) {
  std::vector<float> rows(8);
  PermuteArgs args{.x = view_of(kX, {2, 2}),
                   .slot_of = {kSlotOf.data(), {4}},
                   .top_k = 2,
                   .rows = {rows.data(), Format::kF32, {4, 2}}};
  permute(args, kRef);
  EXPECT_EQ(rows, (std::vector<float>{10, 20, 1, 2, 10, 20, 1, 2}));
  args.weights = View<const float>{kWeights.data(), {2, 2}};
  permute(args, kRef);
  EXPECT_EQ(rows, (std::vector<float>{20, 40, 0.5f, 1, 40, 80, 0.25f, 0.5f}));
}

TEST(Unpermute, SumsTheRowsOfATokenByTheirWeights) {
  const std::vector<float> rows{1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<float> x(4);
  UnpermuteArgs args{.rows = view_of(rows, {4, 2}),
                     .row_of = {kRowOf.data(), {4}},
                     .x = {x.data(), Format::kF32, {2, 2}}};
  unpermute(args, kRef);
  EXPECT_EQ(x, (std::vector<float>{10, 12, 6, 8}));
  args.weights = View<const float>{kWeights.data(), {2, 2}};
  unpermute(args, kRef);
  EXPECT_EQ(x, (std::vector<float>{3.25f, 4, 22, 28}));
}

TEST(UnpermuteWeights, IsTheDotProductOfATokensGradientWithEachOfItsRows) {
  const std::vector<float> rows{1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<float> dweights(4);
  unpermute_weights({.dout = view_of(kX, {2, 2}),
                     .rows = view_of(rows, {4, 2}),
                     .row_of = {kRowOf.data(), {4}},
                     .dweights = {dweights.data(), {2, 2}}},
                    kRef);
  EXPECT_EQ(dweights, (std::vector<float>{11, 23, 50, 170}));
}

}  // namespace
}  // namespace moxie::testing
