// quantize_row_scale: its scales on a worked example, and the bytes of the reference for rows of
// any width on every backend of this machine.
#include "moxie/core/row_scale/row_scale.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/support/arena.h"
#include "tests/support/backends.h"
#include "tests/support/random.h"
#include "tests/support/tensors.h"

namespace moxie::testing {
namespace {

// Ends of 300 groups, more than a CTA has threads; only group 200 has rows.
std::vector<int32_t> one_of_300() {
  std::vector<int32_t> offs(300, 60);
  std::fill_n(offs.begin(), 200, 0);
  return offs;
}

class RowScaleOn : public ::testing::TestWithParam<NamedExec> {
 protected:
  static auto quantized(const Shape& shape, Format format, const std::vector<int32_t>& offs,
                        const Exec& exec) {
    Random random(5);
    auto x = random_values<float>(random, numel(shape), Data::kGaussianLike);
    const int64_t cols = shape.dim(-1);
    x[cols - 1] = NAN, x[2 * cols] = -INFINITY;
    for (int64_t i = 3 * cols; i < 4 * cols; ++i) x[i] = 0;
    Arena arena(exec.backend);
    std::vector<bf16> rounded(x.size());
    for (size_t i = 0; i < x.size(); ++i) rounded[i] = to_bf16(x[i]);
    RowScaleArgs args{.x = {}};
    if (format == Format::kF32)
      args.x = {arena.input(x, shape).data, format, shape};
    else
      args.x = {arena.input(rounded, shape).data, format, shape};
    if (!offs.empty()) args.offs = arena.input(offs, {static_cast<int64_t>(offs.size())});
    const auto out = row_scale_shape<int64_t>(shape, groups_of(offs), Form::kRowwise);
    args.rowwise = {arena.output<e4m3>(out.qdata), arena.output<float>(out.scale)};
    quantize_row_scale(args, exec);
    return arena.results();
  }
};

INSTANTIATE_TEST_SUITE_P(, RowScaleOn, ::testing::ValuesIn(backends_here()),
                         [](const auto& info) { return info.param.name; });

// Widths around multiples of 1024, because on a GPU a row gets one warp per 1024 columns, up to
// eight warps.
TEST_P(RowScaleOn, RowsOfAnyWidthMatchTheReference) {
  const Exec ref{.backend = Backend::kRef}, &exec = GetParam().exec;
  for (const int64_t cols : {1, 8, 203, 1024, 1032, 2048, 2056, 3072, 3080, 4096, 4104, 5120, 5128,
                             6144, 6152, 7168, 7176, 8192, 8200})
    for (const Format format : {Format::kBf16, Format::kF32}) {
      SCOPED_TRACE(std::to_string(cols) + ' ' + std::string(name(format)));
      for (const std::vector<int32_t>& offs :
           {std::vector<int32_t>{}, {0, 1, 40, 40, 70}, {77}, {0, 0, 0}, one_of_300()})
        EXPECT_EQ(quantized({77, cols}, format, offs, exec),
                  quantized({77, cols}, format, offs, ref))
            << offs.size() << " groups";
      EXPECT_EQ(quantized({3, 5, cols}, format, {}, exec),
                quantized({3, 5, cols}, format, {}, ref));
    }
}

TEST(RowScale, GivesOneScalePerRowAndOnePerColumnOfAGroup) {
  const Shape shape{4, 3};
  const std::vector<float> x{1, 2, 3, 448, 1, 1, 0, 0, 0, 900, -NAN, 5};
  const std::vector<int32_t> offs{2, 2, 3};
  std::vector<e4m3> q(12), qt(3 * padded_rows<int64_t>(4, 3, kRowScaleAlignment));
  std::vector<float> s(4, -1), st(9, -1);
  quantize_row_scale(
      {.x = view_of(x, shape),
       .offs = view_of(offs),
       .rowwise = {{{q.data(), shape}, {s.data(), {4}}}},
       .colwise = {{{qt.data(), {3, static_cast<int64_t>(qt.size()) / 3}}, {st.data(), {3, 3}}}}},
      {.backend = Backend::kRef});
  // Row 0: 448 / 3 = 149.3, rounded down to 128, so its scale is 1 / 128. Row 1: 448 / 448 = 1.
  // Row 2 is all zeros: its amax counts as 1e-12. Row 3 is in no group: scale 0.
  EXPECT_EQ(s, (std::vector<float>{1 / 128.f, 1, 0x1p-48f, 0}));
  EXPECT_EQ(st,
            (std::vector<float>{1, 1 / 128.f, 1 / 128.f, 0, 0, 0, 0x1p-48f, 0x1p-48f, 0x1p-48f}));
  EXPECT_EQ(q[2], to_e4m3(3 * 128.f));
  EXPECT_EQ(qt[0], to_e4m3(1.f));
  EXPECT_EQ(qt[1], to_e4m3(448.f));
  EXPECT_EQ(q[9], e4m3{});  // no group covers it
}

}  // namespace
}  // namespace moxie::testing
