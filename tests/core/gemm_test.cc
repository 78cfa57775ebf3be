// The contracts of decode, product and the reference GEMMs, on every backend of this machine.
#include <gtest/gtest.h>

#include <cmath>

#include "moxie/core/gemm/decode.h"
#include "moxie/core/gemm/grouped_mm.h"
#include "moxie/core/gemm/product.h"
#include "tests/support/arena.h"
#include "tests/support/backends.h"
#include "tests/support/random.h"
#include "tests/support/tensors.h"

namespace moxie::testing {
namespace {

const Exec kRef{.backend = Backend::kRef};
const std::vector<int32_t> kOffs{0, 1, 38, 166, 166, 290};  // sizes 0, 1, 37, 128, 0, 124

GemmOperand operand_of(const Quantized& q, Form form) {
  const Block block = q.operand().block;
  return {{q.qdata.data(), q.qdata_shape},
          {q.scale.data(), q.scale_shape},
          outer_of(block, form),
          k_of(block, form),
          q.operand().layout};
}

template <class T>
std::vector<T> as(const std::vector<uint8_t>& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// Signal-to-noise ratio of `actual` in dB; infinite if it equals `expected`.
double snr(const std::vector<float>& expected, const std::vector<float>& actual) {
  double signal = 0, noise = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    signal += double(expected[i]) * expected[i];
    noise += (double(expected[i]) - actual[i]) * (double(expected[i]) - actual[i]);
  }
  return noise == 0 ? INFINITY : 10 * std::log10(signal / noise);
}

std::vector<float> random_floats(uint64_t seed, int64_t count) {
  Random random(seed);
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(random.between(-1000, 1000)) / 256;
  return values;
}

std::vector<NamedExec> cpus_here() {
  auto all = backends_here();
  if (all.back().exec.backend == Backend::kCuda) all.pop_back();
  return all;
}

TEST(Decode, GivesTheBytesOfTheReferenceOnEveryInstructionSet) {
  Random random(7);
  for (int round = 0; round < 400; ++round) {
    const bool stack = random.chance(40);
    const int64_t groups = stack ? random.between(1, 3) : 1, outer = random.between(1, 300);
    const int64_t k = random.between(1, 700);
    const Block block = random.pick<Block>({{1, 32}, {1, 128}, {32, 32}, {128, 32}, {32, 128}});
    const Shape q = stack ? Shape{groups, outer, k} : Shape{outer, k};
    const int64_t scale_rows = ceil_div<int64_t>(outer, block.rows);
    const int64_t scale_cols = ceil_div<int64_t>(k, block.cols);
    const Shape s = stack ? Shape{groups, scale_rows, scale_cols} : Shape{scale_rows, scale_cols};
    const auto qdata = random_bytes<e4m3>(random, numel(q));
    const auto scale = random_bytes<e8m0>(random, numel(s));
    const int64_t first_outer = random.between(0, outer - 1);
    const int64_t first_k = random.between(0, (k - 1) / block.cols) * block.cols;
    const Shape out{random.between(0, outer - first_outer), random.between(0, k - first_k)};
    const int64_t matrix = random.between(0, groups - 1);
    const bool wide = random.chance(50);
    const auto run = [&](const Exec& exec) {
      Arena arena(exec.backend, static_cast<int>(random.chance(50)));
      DecodeArgs args{
          .operand = {arena.input(qdata, q), arena.input(scale, s), block.rows, block.cols},
          .matrix = matrix,
          .first_outer = first_outer,
          .first_k = first_k};
      args.out = arena.float_output(wide ? Format::kF32 : Format::kBf16, out);
      decode(args, exec);
      return arena.results();
    };
    const auto expected = run(kRef);
    for (const auto& backend : cpus_here())
      ASSERT_EQ(run(backend.exec), expected) << backend.name << " round " << round;
  }
}

TEST(Decode, RefusesARangeOutsideTheOperandAndASplitBlock) {
  const auto q = quantize_form(random_floats(1, 64 * 96), {64, 96}, Form::kRowwise, {1, 32});
  std::vector<float> out(64 * 96);
  DecodeArgs args{.operand = operand_of(q, Form::kRowwise),
                  .first_outer = 1,
                  .out = {out.data(), Format::kF32, {64, 96}}};
  EXPECT_THROW(decode(args, kRef), Error);
  args.first_outer = 0, args.first_k = 16, args.out.shape = {64, 32};
  EXPECT_THROW(decode(args, kRef), Error);
}

struct Problem {
  Pass pass;
  Shape a, b, out;
};

constexpr int64_t kRows = 300, kN = 45, kK = 70;
const Problem kProblems[] = {
    {Pass::kForward, {kRows, kK}, {6, kN, kK}, {kRows, kN}},
    {Pass::kDgrad, {kRows, kN}, {6, kN, kK}, {kRows, kK}},
    {Pass::kWgrad, {kRows, kN}, {kRows, kK}, {6, kN, kK}},
};

TEST(Product, MatchesTheReferenceUpToF32RoundingOnEveryBackend) {
  for (const auto& backend : backends_here()) {
    if (backend.exec.backend == Backend::kCpu) continue;  // a CPU only has ref
    for (const Problem& p : kProblems) {
      auto a = random_floats(2, numel(p.a));
      const auto b = random_floats(3, numel(p.b)), bias = random_floats(4, 6 * kN);
      for (int64_t i = 290 * p.a[1]; i < numel(p.a); ++i) a[i] = NAN;  // rows of no group
      for (const bool add : {false, true}) {
        if (add && p.pass != Pass::kWgrad) continue;
        const auto run = [&](const Exec& exec) {
          Arena arena(exec.backend);
          ProductArgs args{.pass = p.pass,
                           .a = {arena.input(a, p.a).data, Format::kF32, p.a},
                           .b = {arena.input(b, p.b).data, Format::kF32, p.b},
                           .offs = arena.input(kOffs, {6}),
                           .sum = add ? Sum::kAdd : Sum::kOverwrite};
          if (p.pass == Pass::kForward)
            args.bias = {arena.input(bias, {6, kN}).data, Format::kF32, {6, kN}};
          args.out = arena.float_output(Format::kF32, p.out);
          product(args, exec);
          return as<float>(arena.results()[0]);
        };
        const auto expected = run(kRef), actual = run(backend.exec);
        // Results are f32 sums of at most 128 products, and each addition may be off by 2^-24 of
        // the sum so far: 120 dB.
        EXPECT_GE(snr(expected, actual), 120) << name(p.pass) << ' ' << backend.name;
      }
    }
  }
}

TEST(Product, GivesZeroForRowsOfNoGroupAndForGroupsWithoutRows) {
  for (const Problem& p : kProblems) {
    auto a = random_floats(2, numel(p.a));
    for (int64_t i = 290 * p.a[1]; i < numel(p.a); ++i) a[i] = NAN;
    const auto b = random_floats(3, numel(p.b));
    std::vector<float> out(numel(p.out), NAN);
    product({.pass = p.pass,
             .a = view_of(a, p.a),
             .b = view_of(b, p.b),
             .offs = view_of(kOffs),
             .out = {out.data(), Format::kF32, p.out}},
            kRef);
    for (const float value : out) ASSERT_FALSE(std::isnan(value)) << name(p.pass);
    const int64_t begin = p.pass == Pass::kWgrad ? 4 * kN * kK : 290 * p.out[1];
    const int64_t end = p.pass == Pass::kWgrad ? 5 * kN * kK : numel(p.out);
    for (int64_t i = begin; i < end; ++i) ASSERT_EQ(out[i], 0) << name(p.pass);
  }
}

TEST(GroupedMm, OfTheReferenceReadsQuadsAsPlainScales) {
  constexpr int64_t kDepth = 700;  // five blocks and a bit
  const auto x = random_floats(5, kRows * kDepth), w = random_floats(6, 6 * kN * kDepth);
  const auto run = [&](ScaleLayout layout) {
    const auto quantized = [&](const auto& values, Shape shape, Block block, const auto& offs) {
      return quantize_form(values, shape, Form::kRowwise, block, offs, ScaleRule::kRceil, layout);
    };
    const auto qx = quantized(x, {kRows, kDepth}, {1, 128}, kOffs);
    const auto qw = quantized(w, {6, kN, kDepth}, {128, 128}, std::vector<int32_t>{});
    std::vector<float> out(kRows * kN, NAN);
    grouped_mm({.a = operand_of(qx, Form::kRowwise),
                .b = operand_of(qw, Form::kRowwise),
                .offs = view_of(kOffs),
                .out = {out.data(), Format::kF32, {kRows, kN}}},
               kRef);
    return out;
  };
  EXPECT_EQ(run(ScaleLayout::kQuads), run(ScaleLayout::kPlain));
}

TEST(GroupedMm, ReferenceMultipliesTheDecodedOperands) {
  for (const Block w_block : {Block{1, 32}, Block{32, 32}, Block{128, 128}}) {
    const auto x = random_floats(5, kRows * kK), w = random_floats(6, 6 * kN * kK);
    const auto qx = quantize_form(x, {kRows, kK}, Form::kRowwise, {1, 128}, kOffs);
    const auto qw = quantize_form(w, {6, kN, kK}, Form::kRowwise, w_block);
    std::vector<float> decoded_x(x.size()), decoded_w(w.size());
    decode({.operand = operand_of(qx, Form::kRowwise),
            .out = {decoded_x.data(), Format::kF32, {kRows, kK}}},
           kRef);
    for (int64_t g = 0; g < 6; ++g)
      decode({.operand = operand_of(qw, Form::kRowwise),
              .matrix = g,
              .out = {decoded_w.data() + g * kN * kK, Format::kF32, {kN, kK}}},
             kRef);
    std::vector<float> expected(kRows * kN), actual(kRows * kN);
    product({.a = view_of(decoded_x, {kRows, kK}),
             .b = view_of(decoded_w, {6, kN, kK}),
             .offs = view_of(kOffs),
             .out = {expected.data(), Format::kF32, {kRows, kN}}},
            kRef);
    grouped_mm({.a = operand_of(qx, Form::kRowwise),
                .b = operand_of(qw, Form::kRowwise),
                .offs = view_of(kOffs),
                .out = {actual.data(), Format::kF32, {kRows, kN}}},
               kRef);
    EXPECT_EQ(actual, expected) << name(w_block);
  }
}

TEST(GroupedWgrad, OfTheReferenceContractsTheRowsOfEachGroupAndAddsWhereAsked) {
  const auto dy = random_floats(7, kRows * kN), x = random_floats(8, kRows * kK);
  const Shape out_shape{6, kN, kK};
  const auto qdy = quantize_form(dy, {kRows, kN}, Form::kColwise, {128, 1}, kOffs);
  const auto qx = quantize_form(x, {kRows, kK}, Form::kColwise, {128, 32}, kOffs);
  GroupedWgradArgs args{.a = operand_of(qdy, Form::kColwise),
                        .b = operand_of(qx, Form::kColwise),
                        .rows = kRows,
                        .offs = view_of(kOffs)};
  std::vector<float> once(numel(out_shape)), twice(numel(out_shape), 1.f);
  args.out = {once.data(), Format::kF32, out_shape};
  grouped_wgrad(args, kRef);
  args.out.data = twice.data();
  args.sum = Sum::kAdd;
  grouped_wgrad(args, kRef);
  std::vector<float> exact(numel(out_shape));
  product({.pass = Pass::kWgrad,
           .a = view_of(dy, {kRows, kN}),
           .b = view_of(x, {kRows, kK}),
           .offs = view_of(kOffs),
           .out = {exact.data(), Format::kF32, out_shape}},
          kRef);
  EXPECT_GE(snr(exact, once), 26);  // rounding both operands to 3 mantissa bits gives about 28 dB
  for (size_t i = 0; i < once.size(); ++i)
    ASSERT_NEAR(twice[i], once[i] + 1, std::abs(once[i]) * 1e-6 + 1e-6);
  for (int64_t i = 4 * kN * kK; i < 5 * kN * kK; ++i) ASSERT_EQ(once[i], 0) << "the empty group";
}

}  // namespace
}  // namespace moxie::testing
