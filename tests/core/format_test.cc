// Compares the formats and scale rules with the spec (NUMERICS.md, sections 1 to 3) for all values.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <thread>
#include <vector>

#include "moxie/core/format/bf16.h"
#include "moxie/core/format/e4m3.h"
#include "moxie/core/format/e8m0.h"
#include "moxie/core/format/f32_scale.h"

namespace moxie {
namespace {

float f32(uint32_t bits) { return std::bit_cast<float>(bits); }
uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }

#if defined(__SANITIZE_ADDRESS__)
// Sanitizers are slow, so they see a sample; a prime step visits every low byte.
constexpr uint64_t kStride = 257;
#else
constexpr uint64_t kStride = 1;
#endif

// Calls f on every kStride-th of the f32 bit patterns with sign bit 0, on all cores. Returns how
// often f was false.
template <class F>
uint64_t count_failures(F f) {
  const unsigned workers = std::max(1u, std::thread::hardware_concurrency());
  std::vector<uint64_t> failures(workers);
  std::vector<std::thread> threads;
  const uint64_t total = uint64_t{1} << 31;
  for (unsigned w = 0; w < workers; ++w)
    threads.emplace_back([&, w] {
      uint64_t count = 0;
      for (uint64_t bits = total * w / workers; bits < total * (w + 1) / workers; bits += kStride)
        count += !f(static_cast<uint32_t>(bits));
      failures[w] = count;
    });
  for (auto& thread : threads) thread.join();
  uint64_t sum = 0;
  for (const uint64_t count : failures) sum += count;
  return sum;
}

// The value of an e4m3 byte from the definition: (-1)^s * 2^(e-7) * (1 + m/8), or 2^-6 * m/8.
double e4m3_value(uint8_t byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  const double magnitude =
      exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return byte & 0x80 ? -magnitude : magnitude;
}

TEST(E4m3, DecodesEveryByteToItsDefinition) {
  for (int byte = 0; byte < 256; ++byte) {
    const float value = to_float(e4m3{static_cast<uint8_t>(byte)});
    if ((byte & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(value)) << byte;
    } else {
      EXPECT_EQ(value, e4m3_value(static_cast<uint8_t>(byte))) << byte;
      EXPECT_EQ(std::signbit(value), byte >= 128) << byte;
    }
  }
}

TEST(E4m3, EncodesEveryByteItDecodesToItself) {
  for (int byte = 0; byte < 256; ++byte) {
    const uint8_t back = to_e4m3(to_float(e4m3{static_cast<uint8_t>(byte)})).bits;
    EXPECT_EQ(back, (byte & 0x7f) == 0x7f ? 0x7f : byte);
  }
}

// Checks the midpoint between each two neighbouring e4m3 values, and the floats just below and
// above it. As rounding is monotonic (another test), this fixes the result for every float.
TEST(E4m3, RoundsEveryBoundaryToNearestEven) {
  for (int low = 0; low < 0x7e; ++low) {
    const double middle =
        (e4m3_value(static_cast<uint8_t>(low)) + e4m3_value(static_cast<uint8_t>(low + 1))) / 2;
    const auto boundary = static_cast<float>(middle);
    ASSERT_EQ(boundary, middle);
    const int even = low % 2 ? low + 1 : low;
    for (const int sign : {0, 0x80}) {
      const float s = sign ? -1.f : 1.f;
      EXPECT_EQ(to_e4m3(s * std::nextafter(boundary, 0.f)).bits, sign | low);
      EXPECT_EQ(to_e4m3(s * boundary).bits, sign | even);
      EXPECT_EQ(to_e4m3(s * std::nextafter(boundary, 1e9f)).bits, sign | (low + 1));
    }
  }
}

TEST(E4m3, IsMonotonicOverEveryFloatAndSymmetricInTheSign) {
  EXPECT_EQ(count_failures([](uint32_t bits) {
              const uint8_t code = to_e4m3(f32(bits)).bits;
              const uint8_t negative = to_e4m3(f32(bits | 0x80000000)).bits;
              if (bits > 0x7f800000) return code == 0x7f && negative == 0x7f;  // NaN
              const uint8_t next = bits == 0x7f800000 ? code : to_e4m3(f32(bits + 1)).bits;
              return code <= next && negative == (code | 0x80);
            }),
            0u);
}

TEST(E4m3, SaturatesAt448AndWritesNanAs7f) {
  EXPECT_EQ(to_e4m3(448.f).bits, 0x7e);
  EXPECT_EQ(to_e4m3(480.f).bits, 0x7e);
  EXPECT_EQ(to_e4m3(3e38f).bits, 0x7e);
  EXPECT_EQ(to_e4m3(-INFINITY).bits, 0xfe);
  EXPECT_EQ(to_e4m3(NAN).bits, 0x7f);
  EXPECT_EQ(to_e4m3(-NAN).bits, 0x7f);
  EXPECT_EQ(to_e4m3(-0.f).bits, 0x80);
}

TEST(Bf16, RoundsToNearestEvenAndKeepsNan) {
  EXPECT_EQ(to_bf16(f32(0x3f808000)).bits, 0x3f80);  // halfway, even below
  EXPECT_EQ(to_bf16(f32(0x3f818000)).bits, 0x3f82);  // halfway, even above
  EXPECT_EQ(to_bf16(f32(0x3f808001)).bits, 0x3f81);
  EXPECT_EQ(to_bf16(f32(0x7f7fffff)).bits, 0x7f80);  // rounds up to infinity
  EXPECT_EQ(to_bf16(f32(0x7f800001)).bits, 0x7fc0);  // would lose its mantissa
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const bf16 value{static_cast<uint16_t>(bits)};
    if (!std::isnan(to_float(value))) {
      EXPECT_EQ(to_bf16(to_float(value)), value);
    }
  }
}

TEST(E8m0, DecodesEveryCode) {
  for (int code = 0; code < 255; ++code) {
    const e8m0 scale{static_cast<uint8_t>(code)};
    EXPECT_EQ(to_float(scale), std::ldexp(1.0, code - 127)) << code;
    EXPECT_EQ(inverse(scale), std::ldexp(1.0, 127 - code)) << code;
  }
  EXPECT_TRUE(std::isnan(to_float(e8m0{255})));
  EXPECT_TRUE(std::isnan(inverse(e8m0{255})));
}

// The scale codes of an amax, computed from the definitions in NUMERICS.md, section 2.
uint8_t spec_rceil(uint32_t bits) {
  const uint32_t d = bits_of(f32(bits) * f32(0x3b124925));  // f32(1 / 448)
  const uint32_t exponent = d >> 23, mantissa = d & 0x7fffff;
  if (exponent == 255) return 255;
  return static_cast<uint8_t>(exponent + (exponent == 0 ? mantissa > 0x400000 : mantissa != 0));
}
uint8_t spec_floor(uint32_t bits) {
  const int exponent = static_cast<int>(bits >> 23);
  if (exponent == 255) return 255;
  return static_cast<uint8_t>(std::min(std::max(exponent - 127 - 8, -127), 128) + 127);
}
uint8_t spec_ceil(uint32_t bits) {
  const int exponent = static_cast<int>(bits >> 23);
  if (exponent == 255) return 255;
  return static_cast<uint8_t>(std::max(exponent - 8 + ((bits & 0x7fffff) > 0), 0));
}
uint8_t spec_even(uint32_t bits) {
  if (bits >= 0x7f800000) return 255;
  return spec_floor((bits + (1u << 19)) & 0xff800000);
}

TEST(ScaleRule, RceilMatchesTheSpecForEveryAmax) {
  EXPECT_EQ(count_failures([](uint32_t bits) {
              return scale_of(f32(bits), ScaleRule::kRceil).code == spec_rceil(bits);
            }),
            0u);
}
TEST(ScaleRule, FloorMatchesTheSpecForEveryAmax) {
  EXPECT_EQ(count_failures([](uint32_t bits) {
              return scale_of(f32(bits), ScaleRule::kFloor).code == spec_floor(bits);
            }),
            0u);
}
TEST(ScaleRule, CeilMatchesTheSpecForEveryAmax) {
  EXPECT_EQ(count_failures([](uint32_t bits) {
              return scale_of(f32(bits), ScaleRule::kCeil).code == spec_ceil(bits);
            }),
            0u);
}
TEST(ScaleRule, EvenMatchesTheSpecForEveryAmax) {
  EXPECT_EQ(count_failures([](uint32_t bits) {
              return scale_of(f32(bits), ScaleRule::kEven).code == spec_even(bits);
            }),
            0u);
}

// The property that defines RCEIL, checked for every bf16 amax.
TEST(ScaleRule, RceilIsTheSmallestScaleThatDoesNotClipForEveryBf16Amax) {
  for (uint32_t upper = 0; upper < 0x7f80; ++upper) {
    const double amax = f32(upper << 16);
    const int code = scale_of(f32(upper << 16), ScaleRule::kRceil).code;
    const double scale = std::ldexp(1.0, code - 127);
    ASSERT_LE(amax, 448 * scale);
    ASSERT_TRUE(code == 0 || amax > 448 * scale / 2) << "wastes a bit at amax = " << amax;
  }
}

TEST(ScaleRule, RceilHasItsOneExceptionAboveTheSmallestScale) {
  EXPECT_EQ(scale_of(f32(0x04600000), ScaleRule::kRceil).code, 0);
  EXPECT_EQ(scale_of(f32(0x04600001), ScaleRule::kRceil).code, 0);  // clips by one ulp
  EXPECT_EQ(scale_of(f32(0x04600002), ScaleRule::kRceil).code, 1);
}

TEST(RowScale, IsTheLargestPowerOfTwoUnderTheQuotientForEveryAmax) {
  EXPECT_EQ(count_failures([](uint32_t bits) {
              const RowScale scale = row_scale_of(f32(bits));
              if (bits >= 0x7f800000) return std::isnan(scale.encode) && std::isnan(scale.decode);
              const double amax = f32(bits);
              const auto quotient = static_cast<float>(448.0 / (amax < 1e-12 ? 1e-12 : amax));
              return scale.encode <= quotient && quotient < 2 * scale.encode &&
                     scale.encode * scale.decode == 1 && (bits_of(scale.encode) & 0x7fffff) == 0;
            }),
            0u);
}

}  // namespace
}  // namespace moxie
