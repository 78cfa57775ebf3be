// Results of swiglu on every backend of this machine must be within one bf16 ulp of ref. They are
// not equal, because backends compute the exponential differently.
#include "moxie/core/swiglu/swiglu.h"

#include <gtest/gtest.h>

#include <cmath>

#include "moxie/core/base/check.h"
#include "moxie/core/base/math.h"
#include "tests/support/arena.h"
#include "tests/support/backends.h"
#include "tests/support/random.h"

namespace moxie::testing {
namespace {

const Exec kRef{.backend = Backend::kRef};
constexpr Activation kActivations[] = {Activation::kSwiglu, Activation::kClampedSwiglu};

// An h in which each of the 2^16 bf16 values occurs once as gate, with random ups of both signs,
// some beyond the limit of clamped_swiglu.
std::vector<bf16> every_gate(int64_t rows, int64_t width) {
  std::vector<bf16> h(rows * 2 * width);
  Random random(3);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t f = 0; f < width; ++f) {
      h[r * 2 * width + f] = bf16{static_cast<uint16_t>(r * width + f)};
      h[(r * 2 + 1) * width + f] = to_bf16(static_cast<float>(random.between(-160, 160)) / 16);
    }
  return h;
}

// Maps the bits of a bf16 to an integer such that neighbouring values differ by 1.
int32_t ordered(uint16_t bits) { return bits & 0x8000 ? -(bits & 0x7fff) : bits; }

void expect_within_one_ulp(const std::vector<uint8_t>& expected, const std::vector<uint8_t>& actual,
                           const std::string& backend) {
  for (size_t i = 0; i < expected.size(); i += 2) {
    uint16_t a, b;
    std::memcpy(&a, &expected[i], 2);
    std::memcpy(&b, &actual[i], 2);
    const bool both_nan = (a & 0x7fff) > 0x7f80 && (b & 0x7fff) > 0x7f80;
    ASSERT_TRUE(both_nan || std::abs(ordered(a) - ordered(b)) <= 1)
        << backend << " element " << i / 2 << ": " << std::hex << a << " and " << b;
  }
}

class SwigluOfEveryGate : public ::testing::TestWithParam<Activation> {};
INSTANTIATE_TEST_SUITE_P(, SwigluOfEveryGate, ::testing::ValuesIn(kActivations),
                         [](const auto& info) { return std::string(name(info.param)); });

TEST_P(SwigluOfEveryGate, IsWithinOneUlpOfTheReference) {
  for (const int64_t width : {64, 61, 1}) {
    const int64_t rows = ceil_div<int64_t>(1 << 16, width);
    auto h = every_gate(rows, width);
    const auto run = [&](const Exec& exec) {
      Arena arena(exec.backend);
      const Shape h_shape{rows, 2 * width}, a_shape{rows, width};
      const auto from = arena.input(h, h_shape);
      swiglu({.h = {from.data, Format::kBf16, h_shape},
              .a = {arena.output<bf16>(a_shape).data, Format::kBf16, a_shape},
              .activation = GetParam()},
             exec);
      return arena.results()[0];
    };
    const auto expected = run(kRef);
    for (const auto& backend : backends_here())
      expect_within_one_ulp(expected, run(backend.exec), backend.name);
  }
}

TEST_P(SwigluOfEveryGate, HasAGradientWithinOneUlpOfTheReference) {
  constexpr int64_t kWidth = 64, kRows = (1 << 16) / kWidth;
  const Shape h_shape{kRows, 2 * kWidth}, a_shape{kRows, kWidth};
  const auto h = every_gate(kRows, kWidth);
  std::vector<bf16> da(kRows * kWidth);
  Random random(4);
  for (auto& value : da) value = to_bf16(static_cast<float>(random.between(-64, 64)) / 32);
  const auto run = [&](const Exec& exec) {
    Arena arena(exec.backend);
    const auto grad = arena.input(da, a_shape);
    const auto from = arena.input(h, h_shape);
    swiglu_backward({.da = {grad.data, Format::kBf16, a_shape},
                     .h = {from.data, Format::kBf16, h_shape},
                     .dh = {arena.output<bf16>(h_shape).data, Format::kBf16, h_shape},
                     .activation = GetParam()},
                    exec);
    return arena.results()[0];
  };
  const auto expected = run(kRef);
  for (const auto& backend : backends_here()) {
    // dgate has the factor s + z s (1 - s), with z = gate (clamped_swiglu: alpha * gate). It is
    // zero near z = -1.28, where an ulp of s is many ulps of the result, so gates there are
    // skipped.
    const float alpha = GetParam() == Activation::kSwiglu ? 1.f : kClampAlpha;
    auto actual = run(backend.exec);
    for (size_t i = 0; i < expected.size(); i += 2) {
      const size_t element = i / 2, col = element % (2 * kWidth);
      if (col >= kWidth) continue;
      const float z = alpha * to_float(h[element]);
      if (z > -1.3f && z < -1.26f) std::memcpy(&actual[i], &expected[i], 2);
    }
    expect_within_one_ulp(expected, actual, backend.name);
  }
}

TEST_P(SwigluOfEveryGate, WeightsScaleTheResultAndItsGradientAndGetTheirs) {
  for (const int64_t width : {1, 8, 100, 128, 300}) {
    constexpr int64_t kRows = 37;
    Random random(width);
    const auto values = [&](int64_t count) {
      std::vector<float> made(count);
      for (float& value : made) value = static_cast<float>(random.between(-128, 128)) / 16;
      return made;
    };
    const auto h = values(kRows * 2 * width), da = values(kRows * width), weights = values(kRows);
    std::vector<int32_t> slot_of(kRows);
    for (int32_t r = 0; r < kRows; ++r) slot_of[r] = (r * 5 + 3) % kRows;
    const Shape h_shape{kRows, 2 * width}, a_shape{kRows, width};
    for (const auto& backend : backends_here()) {
      Arena arena(backend.exec.backend), plain(backend.exec.backend), space(backend.exec.backend);
      const auto run = [&](Arena& to, bool weighted) {
        const ConstFloatView from{to.input(h, h_shape).data, Format::kF32, h_shape};
        const ConstFloatView grad{to.input(da, a_shape).data, Format::kF32, a_shape};
        std::optional<RowWeights> of;
        std::optional<WeightGradient> gradient;
        if (weighted) {
          of = RowWeights{to.input(weights, {kRows}), to.input(slot_of, {kRows})};
          gradient = WeightGradient{*of, to.output<float>({kRows}),
                                    space.output<float>({kRows, weight_gradient_tiles(width)})};
        }
        swiglu({.h = from,
                .a = to.float_output(Format::kF32, a_shape),
                .weights = of,
                .activation = GetParam()},
               backend.exec);
        swiglu_backward({.da = grad,
                         .h = from,
                         .dh = to.float_output(Format::kF32, h_shape),
                         .weights = gradient,
                         .activation = GetParam()},
                        backend.exec);
        std::vector<std::vector<float>> results;
        for (const auto& bytes : to.results()) {
          results.emplace_back(bytes.size() / sizeof(float));
          std::memcpy(results.back().data(), bytes.data(), bytes.size());
        }
        return results;
      };
      const auto with = run(arena, true), without = run(plain, false);
      for (int64_t r = 0; r < kRows; ++r) {
        const float weight = weights[slot_of[r]];
        float sum = 0;
        for (int64_t first = 0; first < width; first += kDotTile) {
          float terms[kDotTile] = {};
          for (int64_t f = first; f < std::min(width, first + kDotTile); ++f)
            terms[f - first] = da[r * width + f] * without[0][r * width + f];
          sum += sum_dot_tile(terms);
        }
        ASSERT_EQ(with[0][slot_of[r]], sum) << backend.name << " width " << width << " row " << r;
        for (int64_t f = 0; f < width; ++f)
          ASSERT_EQ(with[1][r * width + f], weight * without[0][r * width + f]) << backend.name;
        for (int64_t f = 0; f < 2 * width; ++f)
          ASSERT_EQ(with[2][r * 2 * width + f], weight * without[1][r * 2 * width + f])
              << backend.name;
      }
    }
  }
}

// Compares clamped_swiglu and its gradients with the formulas of gpt-oss in f64.
TEST(Swiglu, ClampedIsGptOss) {
  const std::vector<float> gates = {-90, -7.5f, -1, 0, 0.5f, 6.9f, 7, 7.1f, 90};
  const std::vector<float> ups = {-90, -7.1f, -7, -1, 0, 3, 7, 7.1f, 90};
  const auto width = static_cast<int64_t>(gates.size() * ups.size());
  std::vector<float> h(2 * width), da(width);
  for (int64_t f = 0; f < width; ++f) {
    h[f] = gates[f % gates.size()], h[width + f] = ups[f / gates.size()];
    da[f] = 0.5f + static_cast<float>(f % 5);
  }
  const Shape h_shape{1, 2 * width}, a_shape{1, width};
  auto backends = backends_here();
  backends.push_back({"ref", kRef});
  for (const auto& backend : backends) {
    Arena arena(backend.exec.backend);
    const ConstFloatView from{arena.input(h, h_shape).data, Format::kF32, h_shape};
    swiglu({.h = from,
            .a = arena.float_output(Format::kF32, a_shape),
            .activation = Activation::kClampedSwiglu},
           backend.exec);
    swiglu_backward({.da = {arena.input(da, a_shape).data, Format::kF32, a_shape},
                     .h = from,
                     .dh = arena.float_output(Format::kF32, h_shape),
                     .activation = Activation::kClampedSwiglu},
                    backend.exec);
    std::vector<float> a(width), dh(2 * width);
    std::memcpy(a.data(), arena.results()[0].data(), width * sizeof(float));
    std::memcpy(dh.data(), arena.results()[1].data(), 2 * width * sizeof(float));
    for (int64_t f = 0; f < width; ++f) {
      const double gate = h[f], up = h[width + f];
      const double g = std::min(gate, 7.), u = std::min(std::max(up, -7.), 7.);
      const double s = 1 / (1 + std::exp(-1.702 * g));
      const double dgate = gate > 7 ? 0 : da[f] * (u + 1) * (s + 1.702 * g * s * (1 - s));
      const double dup = std::abs(up) > 7 ? 0 : da[f] * g * s;
      // Relative error of about a dozen f32 roundings, and of an exponential whose rounded argument
      // may be as large as 153: that alone can be 153 * 2^-24.
      const double budget = 2e-5;
      const auto near = [&](double expected, float actual) {
        EXPECT_NEAR(expected, actual, budget * std::abs(expected) + 1e-37)
            << backend.name << " gate " << gate << " up " << up;
      };
      near(g * s * (u + 1), a[f]), near(dgate, dh[f]), near(dup, dh[width + f]);
      EXPECT_TRUE(gate <= 7 || dh[f] == 0) << backend.name;
      EXPECT_TRUE(std::abs(up) <= 7 || dh[width + f] == 0) << backend.name;
    }
  }
}

TEST(Swiglu, ClampedLetsNanThrough) {
  const float nan = std::nanf("");
  std::vector<float> h = {nan, 1, 1, nan}, da = {1, 1};
  const Shape h_shape{1, 4}, a_shape{1, 2};
  auto backends = backends_here();
  backends.push_back({"ref", kRef});
  for (const auto& backend : backends) {
    Arena arena(backend.exec.backend);
    const ConstFloatView from{arena.input(h, h_shape).data, Format::kF32, h_shape};
    swiglu({.h = from,
            .a = arena.float_output(Format::kF32, a_shape),
            .activation = Activation::kClampedSwiglu},
           backend.exec);
    swiglu_backward({.da = {arena.input(da, a_shape).data, Format::kF32, a_shape},
                     .h = from,
                     .dh = arena.float_output(Format::kF32, h_shape),
                     .activation = Activation::kClampedSwiglu},
                    backend.exec);
    float a[2], dh[4];
    std::memcpy(a, arena.results()[0].data(), sizeof(a));
    std::memcpy(dh, arena.results()[1].data(), sizeof(dh));
    EXPECT_TRUE(std::isnan(a[0]) && std::isnan(a[1])) << backend.name;
    EXPECT_TRUE(std::isnan(dh[0]) && std::isnan(dh[1]) && std::isnan(dh[2])) << backend.name;
  }
}

TEST(Swiglu, RefusesSlotsThatAreNone) {
  std::vector<float> h(4), a(2), weights(2);
  std::vector<int32_t> slot_of = {0, 2};
  EXPECT_THROW(swiglu({.h = {h.data(), Format::kF32, {2, 2}},
                       .a = {a.data(), Format::kF32, {2, 1}},
                       .weights = RowWeights{{weights.data(), {2}}, {slot_of.data(), {2}}}},
                      kRef),
               Error);
}

TEST(Swiglu, RefusesAnOddNumberOfColumns) {
  std::vector<float> h(9), a(3);
  EXPECT_THROW(
      swiglu({.h = {h.data(), Format::kF32, {3, 3}}, .a = {a.data(), Format::kF32, {3, 1}}}, kRef),
      Error);
}

}  // namespace
}  // namespace moxie::testing
