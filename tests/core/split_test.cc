// split: the three bf16 terms of an f32 add up to it; finish_products rounds and adds up what GEMMs
// made of them. (That backends agree is tested by fuzz_test.)
#include "moxie/core/split/split.h"

#include "moxie/core/split/finish_products.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "moxie/core/base/check.h"

namespace moxie::testing {
namespace {

double sum_of(const std::array<bf16, kBf16Terms>& terms) {
  double sum = 0;
  for (const bf16 term : terms) sum += to_float(term);
  return sum;
}

float made_of(uint32_t sign, uint32_t exponent, uint32_t mantissa) {
  return std::bit_cast<float>(sign << 31 | exponent << 23 | mantissa);
}

// Calls body for values of every exponent and both signs: the first and last 2^9 mantissas, and
// every 1021st between them.
template <class Body>
void for_values(uint32_t first_exponent, uint32_t last_exponent, const Body& body) {
  constexpr uint32_t kMantissas = 1u << 23, kEdge = 1u << 9;
  for (uint32_t exponent = first_exponent; exponent <= last_exponent; ++exponent)
    for (uint32_t m = 0; m < kMantissas; m += m < kEdge || m >= kMantissas - kEdge ? 1 : 1021)
      for (const uint32_t sign : {0u, 1u}) body(made_of(sign, exponent, m));
}

TEST(Split, ThreeTermsAddUpToTheValueBitForBit) {
  constexpr uint32_t kFirst = 127 - 110, kLast = 254;
  for_values(kFirst, kLast, [](float value) {
    const auto terms = bf16_terms(value);
    ASSERT_EQ(sum_of(terms), static_cast<double>(value)) << std::hexfloat << value;
    // The sum is exact in f32 too, if the smallest terms are added first.
    const float sum = to_float(terms[0]) + (to_float(terms[1]) + to_float(terms[2]));
    ASSERT_EQ(std::bit_cast<uint32_t>(sum), std::bit_cast<uint32_t>(value));
  });
}

TEST(Split, LosesHalfOfTheSmallestBf16OfTinyValues) {
  for_values(0, 127 - 111, [](float value) {
    ASSERT_LE(std::abs(sum_of(bf16_terms(value)) - value), std::ldexp(1., -134));
  });
}

TEST(Split, KeepsInfinityAndNanInTheFirstTerm) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float value : {infinity, -infinity}) {
    const auto terms = bf16_terms(value);
    EXPECT_EQ(to_float(terms[0]), value);
    EXPECT_EQ(terms[1], bf16{});
    EXPECT_EQ(terms[2], bf16{});
  }
  const auto terms = bf16_terms(std::numeric_limits<float>::quiet_NaN());
  EXPECT_TRUE(std::isnan(to_float(terms[0])));
  EXPECT_EQ(terms[1], bf16{});
  EXPECT_EQ(terms[2], bf16{});
}

TEST(Split, PutsTheTermsOfARowSideBySide) {
  const float x[] = {1 + 0x1p-10f, 2, 3, 4 + 0x1p-20f};
  std::vector<bf16> out(2 * 3 * 2);
  split(
      {.x = {x, {2, 2}}, .terms = {.term = {1, 0, 1}, .count = 3}, .out = {out.data(), {2, 3 * 2}}},
      {.backend = Backend::kRef});
  std::vector<float> values;
  for (const bf16 value : out) values.push_back(to_float(value));
  EXPECT_EQ(values,
            (std::vector<float>{0x1p-10f, 0, 1, 2, 0x1p-10f, 0, 0, 0x1p-20f, 3, 4, 0, 0x1p-20f}));
}

TEST(Split, ABadCallIsRefused) {
  const float x = 1;
  bf16 out[3];
  const Exec ref{.backend = Backend::kRef};
  const View<const float> one{&x, {1, 1}};
  EXPECT_THROW(split({.x = one, .terms = {}, .out = {out, {1, 0}}}, ref), Error);
  EXPECT_THROW(split({.x = one, .terms = {{3}, 1}, .out = {out, {1, 1}}}, ref), Error);
  EXPECT_THROW(split({.x = one, .terms = {{0, 1}, 2}, .out = {out, {1, 3}}}, ref), Error);
  const bf16 w[2] = {};
  const Copies of_two{.x = {w, {2, 1}}, .out = {out, {3, 1}}};
  EXPECT_THROW(split({.x = one, .terms = {{0}, 1}, .out = {out, {1, 1}}, .copies = of_two}, ref),
               Error);
}

std::vector<bf16> rounded(const std::vector<float>& values) {
  std::vector<bf16> result;
  for (const float value : values) result.push_back(to_bf16(value));
  return result;
}

TEST(Split, CopiesAMatrixBesides) {
  const float x = 1;
  const auto w = rounded({1, 2, 3, 4});
  std::vector<bf16> out(1), copies(12);
  split({.x = {&x, {1, 1}},
         .terms = {{0}, 1},
         .out = {out.data(), {1, 1}},
         .copies = Copies{.x = {w.data(), {2, 2}}, .out = {copies.data(), {6, 2}}}},
        {.backend = Backend::kRef});
  EXPECT_EQ(copies, rounded({1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4}));
}

TEST(FinishProducts, RoundsDxBeforeItAddsTheOtherGradient) {
  // 1 + 2^-8 lies between two bf16 and rounds to 1, the even one; so does 1 + 2^-8 again. Rounded
  // once, the sum 1 + 2^-8 + 2^-8 would be 1 + 2^-7.
  const std::vector<float> from = {1 + 0x1p-8f, 3};
  const auto add = rounded({0x1p-8f, -1});
  std::vector<bf16> to(2);
  const RoundedSum dx{.from = {from.data(), {1, 2}},
                      .add = View<const bf16>{add.data(), {1, 2}},
                      .to = {to.data(), {1, 2}}};
  finish_products({.dx = dx, .dweight = std::nullopt}, {.backend = Backend::kRef});
  EXPECT_EQ(to, rounded({1, 2}));
}

TEST(FinishProducts, AddsTermsInOrderAndNeverGivesANegativeZero) {
  // The first two cancel exactly, so that the third remains; in another order it would be lost.
  const std::vector<float> terms = {0x1p30f, -0.f, -0x1p30f, -0.f, 1, -0.f};
  std::vector<float> sum(2);
  std::vector<bf16> in_bf16(2);
  const View<const float> view{terms.data(), {kBf16Terms, 1, 2}};
  for (const FloatView to : {FloatView{sum.data(), Format::kF32, {1, 2}},
                             FloatView{in_bf16.data(), Format::kBf16, {1, 2}}})
    finish_products({.dx = std::nullopt, .dweight = TermSum{.terms = view, .to = to}},
                    {.backend = Backend::kRef});
  EXPECT_EQ(sum, (std::vector<float>{1, 0}));
  EXPECT_FALSE(std::signbit(sum[1]));
  EXPECT_EQ(in_bf16, rounded({1, 0}));
}

TEST(FinishProducts, RefusesShapesThatDoNotFit) {
  const std::vector<float> values(6);
  std::vector<bf16> out(6);
  const Exec ref{.backend = Backend::kRef};
  const auto finish = [&](const Shape& from, const Shape& to) {
    const RoundedSum dx{.from = {values.data(), from}, .add = std::nullopt, .to = {out.data(), to}};
    finish_products({.dx = dx, .dweight = std::nullopt}, ref);
  };
  EXPECT_THROW(finish({2, 3}, {3, 2}), Error);
  const TermSum two{.terms = {values.data(), {2, 1, 3}}, .to = {out.data(), Format::kBf16, {1, 3}}};
  EXPECT_THROW(finish_products({.dx = std::nullopt, .dweight = two}, ref), Error);
}

}  // namespace
}  // namespace moxie::testing
