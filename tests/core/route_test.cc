// The contracts of route and top_k. fuzz_test compares the backends.
#include "moxie/core/route/route.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/support/tensors.h"

namespace moxie::testing {
namespace {

TEST(Route, OrdersSlotsByExpertThenByTokenThenBySlot) {
  const std::vector<int32_t> ids{2, 0, 0, 2, 2, 1};  // three tokens of two slots
  std::vector<int32_t> offs(4), slot_of(6), row_of(6);
  route({.ids = {ids.data(), {3, 2}},
         .offs = {offs.data(), {4}},
         .slot_of = {slot_of.data(), {6}},
         .row_of = {row_of.data(), {6}},
         .workspace = {nullptr, {0}}},
        {.backend = Backend::kRef});
  EXPECT_EQ(offs, (std::vector<int32_t>{2, 3, 6, 6}));
  EXPECT_EQ(slot_of, (std::vector<int32_t>{1, 2, 5, 0, 3, 4}));
  for (int32_t row = 0; row < 6; ++row) EXPECT_EQ(row_of[slot_of[row]], row);
}

TEST(TopK, GivesTheLargestFirstEqualOnesByIdAndNanLast) {
  const std::vector<float> scores{1, 3, 3, NAN, NAN, -INFINITY, NAN, 0};
  std::vector<int32_t> ids(6);
  top_k({.scores = {scores.data(), {2, 4}}, .ids = {ids.data(), {2, 3}}},
        {.backend = Backend::kRef});
  EXPECT_EQ(ids, (std::vector<int32_t>{1, 2, 0, 3, 1, 0}));
}

}  // namespace
}  // namespace moxie::testing
