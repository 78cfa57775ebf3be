#include "moxie/core/scale_layout/scale_layout.h"

#include <gtest/gtest.h>

#include <set>

#include "moxie/core/quantize/quantize.h"
#include "tests/support/random.h"
#include "tests/support/tensors.h"

namespace moxie::testing {
namespace {

const Exec kRef{.backend = Backend::kRef};

std::vector<e8m0> swizzle(const std::vector<e8m0>& plain, Shape shape, Form form,
                          const std::vector<int32_t>& offs) {
  const Shape to = swizzled_shape<int64_t>(shape, groups_of(offs), form);
  std::vector<e8m0> out(numel(to), e8m0{0xa5});
  swizzle_scale({.form = form,
                 .plain = {plain.data(), shape},
                 .offs = view_of(offs),
                 .swizzled = {out.data(), to}},
                kRef);
  return out;
}

TEST(Swizzle, PutsTheFirst32RowsOfATileSixteenBytesApart) {
  EXPECT_EQ(swizzled_index(0, 0, 1), 0);
  EXPECT_EQ(swizzled_index(0, 3, 1), 3);
  EXPECT_EQ(swizzled_index(1, 0, 1), 16);
  EXPECT_EQ(swizzled_index(32, 0, 1), 4);
  EXPECT_EQ(swizzled_index(127, 3, 1), 511);
  EXPECT_EQ(swizzled_index(0, 4, 2), 512);
  EXPECT_EQ(swizzled_index(128, 0, 2), 1024);
}

TEST(Swizzle, IsAPermutationOfEachTile) {
  std::set<int64_t> seen;
  for (int64_t r = 0; r < 256; ++r)
    for (int64_t c = 0; c < 12; ++c) seen.insert(swizzled_index(r, c, 3));
  EXPECT_EQ(seen.size(), 256u * 12);
  EXPECT_EQ(*seen.rbegin(), 256 * 12 - 1);
}

TEST(Swizzle, HasTheBufferSizesOfTheSpec) {
  EXPECT_EQ(swizzled_shape<int64_t>({100, 3}, std::nullopt, Form::kRowwise), Shape(128, 4));
  EXPECT_EQ(swizzled_shape<int64_t>({100, 3}, 8, Form::kRowwise), Shape(100 + 128 * 8, 4));
  EXPECT_EQ(swizzled_shape<int64_t>({100, 9}, 8, Form::kColwise), Shape(128, 9 + 4 * 8));
  EXPECT_EQ(swizzled_shape<int64_t>({6, 130, 5}, std::nullopt, Form::kRowwise), Shape(6, 256 * 8));
}

TEST(Swizzle, StartsEveryGroupOnATileOfItsOwn) {
  std::vector<e8m0> plain(131 * 2, e8m0{9});
  const auto out = swizzle(plain, {131, 2}, Form::kRowwise, {1, 1, 130});  // row 130: no group
  for (int64_t i = 0; i < static_cast<int64_t>(out.size()); ++i) {
    bool covered = false;
    for (int64_t c = 0; c < 2; ++c) {
      covered |= i == c;  // group 0: one row
      for (int64_t r = 0; r < 129; ++r) covered |= i == 512 + swizzled_index(r, c, 1);
    }
    ASSERT_EQ(out[i].code, covered ? 9 : 0) << i;
  }
}

TEST(Unswizzle, UndoesSwizzle) {
  Random random(4);
  for (int i = 0; i < 100; ++i) {
    const Form form = random.chance(50) ? Form::kRowwise : Form::kColwise;
    const Shape shape{random.between(1, 300), random.between(1, 30)};
    const int64_t ragged = form == Form::kRowwise ? shape[0] : shape[1];
    auto offs = random_offs(random, ragged, random.pick<int64_t>({1, 5, 33}));
    offs.back() = static_cast<int32_t>(ragged);
    const auto plain = random_bytes<e8m0>(random, numel(shape));
    const auto swizzled = swizzle(plain, shape, form, offs);
    std::vector<e8m0> back(plain.size(), e8m0{0xa5});
    unswizzle_scale(
        {.form = form,
         .swizzled = {swizzled.data(), swizzled_shape<int64_t>(shape, groups_of(offs), form)},
         .offs = view_of(offs),
         .plain = {back.data(), shape}},
        kRef);
    ASSERT_EQ(back, plain);
  }
}

TEST(Quads, PutFourAlongKSideBySideAndThenTheNextRow) {
  EXPECT_EQ(quad_index(0, 0, 40), 0);
  EXPECT_EQ(quad_index(0, 3, 40), 3);
  EXPECT_EQ(quad_index(1, 0, 40), 4);
  EXPECT_EQ(quad_index(9, 3, 40), 39);
  EXPECT_EQ(quad_index(0, 4, 40), 40);
  EXPECT_EQ(quad_index(2, 9, 40), 89);
}

// Scales that a quantizer writes as quads must be those that it writes plain: four along k, then
// the next row's four, with zeros as padding.
void expect_quads_are_plain_scales_in_order(Shape x, const std::vector<int32_t>& offs, Form form,
                                            Block block) {
  Random random(6);
  const auto values = random_values<bf16>(random, numel(x), Data::kWide);
  const auto plain = quantize_form(values, x, form, block, offs);
  const auto quads =
      quantize_form(values, x, form, block, offs, ScaleRule::kRceil, ScaleLayout::kQuads);
  const int64_t rows = plain.scale_shape.dim(-2), cols = plain.scale_shape.dim(-1);
  const int64_t padded = round_up<int64_t>(cols, 4), matrices = x.dims == 3 ? x[0] : 1;
  EXPECT_EQ(quads.scale_shape,
            x.dims == 3 ? Shape(x[0], padded / 4 * rows, 4) : Shape(padded / 4 * rows, 4));
  std::vector<e8m0> expected;
  for (int64_t g = 0; g < matrices; ++g)
    for (int64_t quad = 0; quad < padded; quad += 4)
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = quad; j < quad + 4; ++j)
          expected.push_back(j < cols ? plain.scale[(g * rows + i) * cols + j] : e8m0{0});
  EXPECT_EQ(quads.scale, expected);
  EXPECT_EQ(quads.qdata, plain.qdata);
}

TEST(Quads, OfAQuantizerAreItsPlainScalesInOrder) {
  const std::vector<int32_t> offs{0, 1, 130, 130, 400, 528};  // rows 528 to 600 are in no group
  expect_quads_are_plain_scales_in_order({601, 700}, offs, Form::kRowwise, {1, 128});
  expect_quads_are_plain_scales_in_order({601, 700}, offs, Form::kColwise, {128, 1});
  expect_quads_are_plain_scales_in_order({601, 700}, offs, Form::kColwise, {128, 32});
  expect_quads_are_plain_scales_in_order({512, 512}, {}, Form::kColwise, {128, 128});
  expect_quads_are_plain_scales_in_order({3, 600, 300}, {}, Form::kRowwise, {128, 128});
  expect_quads_are_plain_scales_in_order({3, 600, 300}, {}, Form::kColwise, {128, 128});
}

// Scales that a quantizer writes swizzled must equal its plain scales after replicate_scale (to one
// per 1 x 32) and swizzle_scale.
void expect_direct_equals_composed(Shape x, const std::vector<int32_t>& offs, Form form,
                                   Block block) {
  Random random(5);
  const auto values = random_values<bf16>(random, numel(x), Data::kWide);
  const auto plain = quantize_form(values, x, form, block, offs);
  const auto direct =
      quantize_form(values, x, form, block, offs, ScaleRule::kRceil, ScaleLayout::kSwizzled);
  Shape replicated = plain.qdata_shape;
  replicated.size[replicated.dims - 1] = ceil_div<int64_t>(replicated.dim(-1), 32);
  std::vector<e8m0> all(numel(replicated));
  replicate_scale({.form = form,
                   .block = block,
                   .compact = {plain.scale.data(), plain.scale_shape},
                   .replicated = {all.data(), replicated}},
                  kRef);
  // Ends of the groups; for colwise, in columns of scales, with groups padded to whole blocks.
  std::vector<int32_t> scale_offs = offs;
  if (form == Form::kColwise) {
    int64_t begin = 0, padded = 0;
    for (auto& end : scale_offs) {
      padded += round_up<int64_t>(end - begin, block.rows);
      begin = std::exchange(end, static_cast<int32_t>(padded / 32));
    }
  }
  EXPECT_EQ(direct.scale, swizzle(all, replicated, form, scale_offs))
      << x << ' ' << name(form) << ' ' << name(block);
}

TEST(Quantize, WritesSwizzledScalesAsReplicateAndSwizzleWould) {
  for (const Block block : kBlocks)
    for (const Form form : {Form::kRowwise, Form::kColwise}) {
      if (!is_operand_block(block, form)) continue;
      expect_direct_equals_composed({3, 150, 170}, {}, form, block);
      expect_direct_equals_composed({150, 170}, {}, form, block);
      if (form == Form::kColwise || block.rows == 1)
        expect_direct_equals_composed({300, 170}, {0, 1, 129, 257, 300}, form, block);
    }
}

TEST(CompactScale, UndoesReplicateScale) {
  Random random(6);
  for (const Block block : kBlocks)
    for (const Form form : {Form::kRowwise, Form::kColwise}) {
      if (!is_operand_block(block, form)) continue;
      const Shape replicated{2, 140, 9};
      const Shape compact = compact_shape<int64_t>(replicated, form, block);
      const auto scale = random_bytes<e8m0>(random, numel(compact));
      std::vector<e8m0> all(numel(replicated)), back(scale.size());
      replicate_scale({.form = form,
                       .block = block,
                       .compact = {scale.data(), compact},
                       .replicated = {all.data(), replicated}},
                      kRef);
      compact_scale({.form = form,
                     .block = block,
                     .replicated = {all.data(), replicated},
                     .compact = {back.data(), compact}},
                    kRef);
      EXPECT_EQ(back, scale) << name(form) << ' ' << name(block);
    }
}

}  // namespace
}  // namespace moxie::testing
