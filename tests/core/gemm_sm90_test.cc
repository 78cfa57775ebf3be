// The Hopper GEMMs against sums in f64, on small problems with edge cases.
#include <gtest/gtest.h>

#include <cmath>
#include <sstream>

#include "moxie/core/base/device.h"
#include "moxie/core/gemm/grouped_mm.h"
#include "moxie/core/gemm/grouped_wgrad.h"
#include "tests/support/arena.h"
#include "tests/support/gemm_operands.h"
#include "tests/support/tensors.h"

namespace moxie::testing {
namespace {

bool has_hopper() { return has_cuda_device() && compute_capability(0) == 90; }

#define MOXIE_NEEDS_HOPPER() \
  if (!has_hopper()) GTEST_SKIP() << "no device of compute capability 9.0"

struct Span {
  int64_t begin, rows, padded;
};

std::vector<Span> spans_of(const std::vector<int32_t>& offs, int64_t rows) {
  const Panels panels{.rows = rows,
                      .cols = 0,
                      .count = static_cast<int64_t>(offs.size()),
                      .offs = offs.data(),
                      .weights = false};
  std::vector<Span> spans;
  Panel panel = first_panel();
  for (size_t g = 0; g < offs.size(); ++g) {
    panel = next_panel(panels, panel, 128);
    spans.push_back({panel.begin, panel.rows, panel.padded});
  }
  return spans;
}

// ---- results -----------------------------------------------------------------------------------

std::vector<float> floats(const std::vector<uint8_t>& bytes, Format format) {
  std::vector<float> values(bytes.size() / bytes_of(format));
  for (size_t i = 0; i < values.size(); ++i) {
    if (format == Format::kF32) {
      std::memcpy(&values[i], &bytes[4 * i], 4);
    } else {
      bf16 value;
      std::memcpy(&value, &bytes[2 * i], 2);
      values[i] = to_float(value);
    }
  }
  return values;
}

// Tensor cores keep about 14 bits of a sum, which is promoted every 128 of k: at least 70 dB. A
// bf16 result must be the rounded f32 result: within half a unit in the last of eight bits, so at
// least 54.5 dB if there are enough results for a mean.
void expect_close(const std::vector<double>& expected, const std::vector<float>& actual,
                  Format format) {
  ASSERT_EQ(expected.size(), actual.size());
  double signal = 0, noise = 0, rounding = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(std::isnan(expected[i]), std::isnan(actual[i])) << "element " << i;
    ASSERT_FALSE(std::isinf(actual[i])) << "element " << i;
    if (std::isnan(expected[i])) continue;
    // Scaled so that squares neither underflow nor overflow.
    const double e = std::ldexp(expected[i], 40), difference = std::ldexp(actual[i], 40) - e;
    const double rounded = to_float(to_bf16(static_cast<float>(expected[i])));
    signal += e * e, noise += difference * difference;
    rounding += std::pow(std::ldexp(rounded - expected[i], 40), 2);
  }
  if (noise == 0) return;
  const double decibels = 10 * std::log10(signal / noise);
  if (format == Format::kF32) {
    EXPECT_GE(decibels, 70);
  } else {
    const double best = rounding > 0 ? 10 * std::log10(signal / rounding) : 100;
    EXPECT_GE(decibels, std::min(best - 0.5, 54.5)) << "rounding alone leaves " << best;
  }
}

struct Case {
  std::string name;
  int64_t rows = 0, n = 0, k = 0;
  std::vector<int32_t> offs;
  Codes codes = Codes::kCalm;
  Format out = Format::kBf16;
  int bias = 0;  // 0: none; 1: [N]; 2: [G, N]
  Format bias_format = Format::kBf16;
  Sum sum = Sum::kOverwrite;
  Padding padding = Padding::kZeros;
};

OptionalOffs offs_in(Arena& arena, const std::vector<int32_t>& offs) {
  if (offs.empty()) return std::nullopt;
  return arena.input(offs, {static_cast<int64_t>(offs.size())});
}

void run_mm(const Case& c, uint64_t seed) {
  SCOPED_TRACE(c.name);
  Random random(seed);
  const int64_t groups = std::max<size_t>(c.offs.size(), 1);
  std::vector<int32_t> ends = c.offs;
  if (ends.empty()) ends = {static_cast<int32_t>(c.rows)};
  const auto spans = spans_of(ends, c.rows);
  Matrix a = random_matrix(random, {1, c.rows, c.k}, 1, c.codes, true);
  const Matrix b = random_matrix(random, {groups, c.n, c.k}, 128, c.codes, false);
  for (int64_t r = spans.back().begin + spans.back().rows; r < c.rows; ++r) {
    std::fill_n(a.qdata.begin() + r * c.k, c.k, e4m3{kE4m3Nan});
    std::fill_n(a.scale.begin() + r * a.scale_cols(), a.scale_cols(), e8m0{kE8m0Nan});
  }
  const auto bias_values = random_values<bf16>(random, groups * c.n, Data::kGaussianLike);

  const auto x = a.decode(), w = b.decode();
  std::vector<double> expected(c.rows * c.n);
  for (int64_t g = 0; g < groups; ++g)
    for (int64_t r = spans[g].begin; r < spans[g].begin + spans[g].rows; ++r)
      for (int64_t n = 0; n < c.n; ++n) {
        double sum = 0;
        for (int64_t k = 0; k < c.k; ++k) sum += x[r * c.k + k] * w[(g * c.n + n) * c.k + k];
        if (c.bias) sum += to_float(bias_values[(c.bias == 2 ? g * c.n : 0) + n]);
        expected[r * c.n + n] = sum;
      }

  std::vector<uint8_t> results[2];
  for (auto& result : results) {
    Arena arena(Backend::kCuda);
    GroupedMmArgs args{.a = operand_in(arena, a, false), .b = operand_in(arena, b, true)};
    args.offs = offs_in(arena, c.offs);
    if (c.bias) {
      const Shape shape = c.bias == 2 ? Shape{groups, c.n} : Shape{c.n};
      const std::vector<bf16> some(bias_values.begin(), bias_values.begin() + numel(shape));
      std::vector<float> wide;
      for (const bf16 value : some) wide.push_back(to_float(value));
      const void* data = c.bias_format == Format::kF32
                             ? static_cast<const void*>(arena.input(wide, shape).data)
                             : arena.input(some, shape).data;
      args.bias = ConstFloatView{data, c.bias_format, shape};
    }
    args.out = arena.float_output(c.out, {c.rows, c.n});
    grouped_mm(args, {.backend = Backend::kCuda});
    result = arena.results()[0];
  }
  EXPECT_EQ(results[0], results[1]) << "two runs differ";
  expect_close(expected, floats(results[0], c.out), c.out);
}

void run_wgrad(const Case& c, uint64_t seed) {
  SCOPED_TRACE(c.name);
  Random random(seed);
  const int64_t groups = std::max<size_t>(c.offs.size(), 1);
  std::vector<int32_t> ends = c.offs;
  if (ends.empty()) ends = {static_cast<int32_t>(c.rows)};
  const auto spans = spans_of(ends, c.rows);
  const int64_t padded = colwise_k(c.rows, groups_of(c.offs), 128);
  Matrix a = random_matrix(random, {1, c.n, padded}, 1, c.codes, true);
  Matrix b = random_matrix(random, {1, c.k, padded}, 32, c.codes, false);
  for (Matrix* m : {&a, &b})
    for (int64_t i = 0; i < m->outer; ++i) {
      auto row = m->qdata.begin() + i * padded;
      auto codes = m->scale.begin() + i / m->outer_block * m->scale_cols();
      int64_t end = 0;
      for (const Span& s : spans) {
        end = s.padded + round_up<int64_t>(s.rows, 128);
        for (auto q = row + s.padded + s.rows; q < row + end; ++q) {
          *q = e4m3{0};
          if (c.padding == Padding::kAnything)
            *q = e4m3{random.chance(50) ? kE4m3Nan : static_cast<uint8_t>(random.bits())};
        }
      }
      std::fill(row + end, row + padded, e4m3{kE4m3Nan});
      std::fill(codes + end / 128, codes + padded / 128, e8m0{kE8m0Nan});
    }

  const std::vector<float> old = random_values<float>(random, 1, Data::kGaussianLike);
  const auto dy = a.decode(), x = b.decode();
  std::vector<double> expected(groups * c.n * c.k);
  for (int64_t g = 0; g < groups; ++g)
    for (int64_t n = 0; n < c.n; ++n)
      for (int64_t k = 0; k < c.k; ++k) {
        double sum = c.sum == Sum::kAdd ? old[0] : 0;
        for (int64_t r = spans[g].padded; r < spans[g].padded + spans[g].rows; ++r)
          sum += dy[n * padded + r] * x[k * padded + r];
        expected[(g * c.n + n) * c.k + k] = sum;
      }

  std::vector<uint8_t> results[2];
  for (auto& result : results) {
    Arena arena(Backend::kCuda), workspace(Backend::kCuda);
    GroupedWgradArgs args{.a = operand_in(arena, a, false),
                          .b = operand_in(arena, b, false),
                          .rows = c.rows,
                          .offs = offs_in(arena, c.offs),
                          .out = arena.float_output(c.out, {groups, c.n, c.k}),
                          .sum = c.sum,
                          .padding = c.padding};
    if (c.padding == Padding::kAnything && args.offs)
      args.workspace = workspace.output<std::byte>({kWgradWorkspace});
    if (c.sum == Sum::kAdd) {
      const std::vector<float> all(numel(args.out.shape), old[0]);
      copy_to_device(args.out.data, all.data(), all.size() * sizeof(float));
    }
    grouped_wgrad(args, {.backend = Backend::kCuda});
    result = arena.results()[0];
    workspace.results();  // checks its fences
  }
  EXPECT_EQ(results[0], results[1]) << "two runs differ";
  expect_close(expected, floats(results[0], c.out), c.out);
}

// ---- problems ----------------------------------------------------------------------------------

Case random_case(uint64_t number, bool wgrad) {
  Random random(number);
  Case c;
  const int64_t groups = random.pick<int64_t>({0, 1, 2, 3, 5, 8, 17, 40, 300});
  c.rows = random.pick<int64_t>({1, 64, 127, 128, 129, 255, 256, 300, 513, 700});
  if (groups > 0) {
    c.offs = random_offs(random, c.rows, groups);
    if (groups > 10) c.rows = std::max<int64_t>(c.rows, 300);
  }
  c.n = 16 * random.pick<int64_t>({1, 2, 3, 7, 8, 9, 16, 17, 20});
  c.k = 16 * random.pick<int64_t>({1, 3, 8, 9, 16, 31, 32, 33, 45});
  if (groups > 20) c.n = std::min<int64_t>(c.n, 48);
  if (groups > 20 && wgrad) c.k = std::min<int64_t>(c.k, 48);
  c.codes = static_cast<Codes>(number % kNumCodes);
  c.out = random.chance(50) ? Format::kBf16 : Format::kF32;
  const bool tiny = c.codes == Codes::kLowTimesHigh || c.codes == Codes::kHighTimesLow;
  c.bias = tiny ? 0 : static_cast<int>(random.below(3));
  if (groups == 0) c.bias = std::min(c.bias, 1);
  c.bias_format = random.chance(50) ? Format::kBf16 : Format::kF32;
  c.sum = c.out == Format::kF32 && random.chance(50) ? Sum::kAdd : Sum::kOverwrite;
  c.padding = random.chance(50) ? Padding::kAnything : Padding::kZeros;
  std::ostringstream name;
  name << "case " << number << ": rows " << c.rows << " n " << c.n << " k " << c.k << " groups "
       << groups << " codes " << number % kNumCodes << " out " << moxie::name(c.out) << " bias "
       << c.bias << " add " << (c.sum == Sum::kAdd) << " any padding "
       << (c.padding == Padding::kAnything);
  c.name = name.str();
  return c;
}

constexpr uint64_t kFuzzCases = 120;

TEST(GroupedMmSm90, IsCloseToTheSumInF64OnRandomProblems) {
  MOXIE_NEEDS_HOPPER();
  for (uint64_t number = 0; number < kFuzzCases; ++number)
    run_mm(random_case(number, false), number);
}

TEST(GroupedWgradSm90, IsCloseToTheSumInF64OnRandomProblems) {
  MOXIE_NEEDS_HOPPER();
  for (uint64_t number = 0; number < kFuzzCases; ++number)
    run_wgrad(random_case(number, true), number);
}

// Large enough for the tall tile and several tiles per pair of CTAs.
TEST(GroupedMmSm90, WalksThroughManyTiles) {
  MOXIE_NEEDS_HOPPER();
  for (const Format out : {Format::kBf16, Format::kF32})
    run_mm({.name = "many",
            .rows = 9000,
            .n = 1040,
            .k = 144,
            .offs = {100, 100, 5000, 8999},
            .out = out},
           7);
}

// "rounds" has two rounds of all pairs per group, and tiles that are left over. Adding to the
// result shows tiles that are computed twice.
TEST(GroupedWgradSm90, WalksThroughManyTiles) {
  MOXIE_NEEDS_HOPPER();
  for (const Format out : {Format::kBf16, Format::kF32})
    for (const Padding padding : {Padding::kZeros, Padding::kAnything}) {
      const std::vector<int32_t> six = {10, 10, 333, 461, 461, 700}, three = {20, 20, 90};
      Case many{.name = "many", .rows = 700, .n = 1056, .k = 1040, .offs = six, .out = out};
      many.padding = padding;
      run_wgrad(many, 8);
      Case rounds{.name = "rounds", .rows = 90, .n = 2048, .k = 4608, .offs = three, .out = out};
      rounds.sum = out == Format::kF32 ? Sum::kAdd : Sum::kOverwrite;
      rounds.padding = padding;
      run_wgrad(rounds, 9);
    }
}

TEST(GroupedMmSm90, NeverLeavesItsBufferForAnyOffs) {
  MOXIE_NEEDS_HOPPER();
  run_mm({.name = "offs", .rows = 400, .n = 144, .k = 256, .offs = {-5, 300, 20, 1 << 30, 7}}, 3);
  run_wgrad({.name = "offs", .rows = 400, .n = 144, .k = 80, .offs = {-5, 300, 20, 1 << 30, 7}}, 4);
}

#ifdef MOXIE_CUDA
TEST(GroupedMmSm90, ReplaysFromAGraphWithOtherOffs) {
  MOXIE_NEEDS_HOPPER();
  constexpr int64_t kRows = 500, kN = 160, kK = 256, kGroups = 4;
  Random random(11);
  const Matrix a = random_matrix(random, {1, kRows, kK}, 1, Codes::kCalm, true);
  const Matrix b = random_matrix(random, {kGroups, kN, kK}, 128, Codes::kCalm, false);
  Arena arena(Backend::kCuda);
  GroupedMmArgs args{.a = operand_in(arena, a, false), .b = operand_in(arena, b, true)};
  args.offs = arena.input(std::vector<int32_t>(kGroups), {kGroups});
  GroupedMmArgs direct = args;
  args.out = arena.float_output(Format::kBf16, {kRows, kN});
  direct.out = arena.float_output(Format::kBf16, {kRows, kN});

  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  check_device("stream", cudaStreamCreate(&stream));
  check_device("begin", cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  grouped_mm(args, {.backend = Backend::kCuda, .stream = stream});
  check_device("end", cudaStreamEndCapture(stream, &graph));
  check_device("instantiate", cudaGraphInstantiate(&replay, graph, 0));
  for (int i = 0; i < 200; ++i) {
    const auto offs = random_offs(random, kRows, kGroups);
    copy_to_device(const_cast<int32_t*>(args.offs->data), offs.data(), sizeof(int32_t) * kGroups);
    check_device("replay", cudaGraphLaunch(replay, stream));
    check_device("wait", cudaStreamSynchronize(stream));
    grouped_mm(direct, {.backend = Backend::kCuda});
    const auto results = arena.results();
    ASSERT_EQ(results[0], results[1]) << "replay " << i;
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

// The tensor maps of the groups are made anew in every replay. NaN in the padding gives the bytes
// that zeros give.
TEST(GroupedWgradSm90, ReplaysFromAGraphWithOtherOffsAndAnyPadding) {
  MOXIE_NEEDS_HOPPER();
  constexpr int64_t kRows = 900, kN = 208, kK = 160, kGroups = 5;
  Random random(13);
  const int64_t padded = padded_rows<int64_t>(kRows, kGroups, 128);
  Matrix a = random_matrix(random, {1, kN, padded}, 1, Codes::kCalm, true);
  Matrix b = random_matrix(random, {1, kK, padded}, 32, Codes::kCalm, false);
  Arena arena(Backend::kCuda), workspace(Backend::kCuda);
  GroupedWgradArgs args{.a = operand_in(arena, a, false),
                        .b = operand_in(arena, b, false),
                        .rows = kRows,
                        .padding = Padding::kAnything,
                        .workspace = workspace.output<std::byte>({kWgradWorkspace})};
  args.offs = arena.input(std::vector<int32_t>(kGroups), {kGroups});
  args.out = arena.float_output(Format::kF32, {kGroups, kN, kK});
  GroupedWgradArgs zeros = args;
  zeros.padding = Padding::kZeros;
  zeros.out = arena.float_output(Format::kF32, {kGroups, kN, kK});

  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  check_device("stream", cudaStreamCreate(&stream));
  check_device("begin", cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  grouped_wgrad(args, {.backend = Backend::kCuda, .stream = stream});
  check_device("end", cudaStreamEndCapture(stream, &graph));
  check_device("instantiate", cudaGraphInstantiate(&replay, graph, 0));
  for (int i = 0; i < 100; ++i) {
    const auto offs = random_offs(random, kRows, kGroups);
    const auto spans = spans_of(offs, kRows);
    const auto upload_with = [&](e4m3 padding) {
      for (auto [matrix, view] : {std::pair{&a, args.a.qdata}, std::pair{&b, args.b.qdata}}) {
        for (int64_t row = 0; row < matrix->outer; ++row) {
          e4m3* const data = matrix->qdata.data() + row * padded;
          int64_t live = 0;
          for (const Span& s : spans) {
            std::fill(data + live, data + s.padded, padding);
            live = s.padded + s.rows;
            for (int64_t r = s.padded; r < live; ++r)
              data[r] = e4m3{static_cast<uint8_t>((row * 31 + r * 7 + i) % 0x70)};
          }
          std::fill(data + live, data + padded, padding);
        }
        copy_to_device(const_cast<e4m3*>(view.data), matrix->qdata.data(), matrix->qdata.size());
      }
    };
    copy_to_device(const_cast<int32_t*>(args.offs->data), offs.data(), sizeof(int32_t) * kGroups);
    upload_with(e4m3{0});
    grouped_wgrad(zeros, {.backend = Backend::kCuda});
    check_device("wait", cudaDeviceSynchronize());
    upload_with(e4m3{kE4m3Nan});
    check_device("replay", cudaGraphLaunch(replay, stream));
    check_device("wait", cudaStreamSynchronize(stream));
    const auto results = arena.results();
    ASSERT_EQ(results[0], results[1]) << "replay " << i;
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST(GroupedWgradSm90, RefusesAWorkspaceOfAnotherSize) {
  MOXIE_NEEDS_HOPPER();
  Random random(14);
  Arena arena(Backend::kCuda);
  const int64_t padded = padded_rows<int64_t>(300, 2, 128);
  GroupedWgradArgs args{
      .a = operand_in(arena, random_matrix(random, {1, 32, padded}, 1, Codes::kCalm, true), false),
      .b =
          operand_in(arena, random_matrix(random, {1, 32, padded}, 32, Codes::kCalm, false), false),
      .rows = 300,
      .offs = offs_in(arena, {100, 300}),
      .out = arena.float_output(Format::kF32, {2, 32, 32}),
      .padding = Padding::kAnything};
  EXPECT_THROW(grouped_wgrad(args, {.backend = Backend::kCuda}), Error);
  args.workspace = arena.output<std::byte>({kWgradWorkspace - 1});
  EXPECT_THROW(grouped_wgrad(args, {.backend = Backend::kCuda}), Error);
}

// Concurrent launches have their own throttle counters (throttle.cuh); sharing one only costs time.
// This runs more launches than there are counters, with small and large problems.
TEST(GroupedWgradSm90, GivesTheSameOnTwoStreamsAtOnceAsAlone) {
  MOXIE_NEEDS_HOPPER();
  constexpr int64_t kRows = 3000, kN = 1024, kK = 768, kLaunches = 100;
  const std::vector<int32_t> offs{500, 500, 1900, 2999};
  const int64_t groups = static_cast<int64_t>(offs.size());
  const int64_t padded = padded_rows<int64_t>(kRows, groups, 128);
  Random random(12);
  Arena arena(Backend::kCuda);
  GroupedWgradArgs args{
      .a = operand_in(arena, random_matrix(random, {1, kN, padded}, 1, Codes::kCalm, true), false),
      .b =
          operand_in(arena, random_matrix(random, {1, kK, padded}, 32, Codes::kCalm, false), false),
      .rows = kRows,
      .offs = offs_in(arena, offs)};
  GroupedWgradArgs few = args;  // fewer pairs than the device can run
  few.a = operand_in(arena, random_matrix(random, {1, 256, padded}, 1, Codes::kCalm, true), false);
  few.b =
      operand_in(arena, random_matrix(random, {1, 256, padded}, 32, Codes::kCalm, false), false);
  std::vector<GroupedWgradArgs> runs{args, args, args, few, few};
  for (auto& run : runs)
    run.out = arena.float_output(Format::kBf16, {groups, run.a.qdata.dim(0), run.b.qdata.dim(0)});
  grouped_wgrad(runs[0], {.backend = Backend::kCuda});
  grouped_wgrad(runs[3], {.backend = Backend::kCuda});
  check_device("wait", cudaDeviceSynchronize());
  cudaStream_t streams[2];
  for (auto& stream : streams)
    check_device("stream", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (int i = 0; i < kLaunches; ++i)
    for (int which = 0; which < 2; ++which) {
      const Exec exec{.backend = Backend::kCuda, .stream = streams[which]};
      grouped_wgrad(runs[1 + which], exec);
      if (which == 0) grouped_wgrad(runs[4], exec);
    }
  check_device("wait", cudaDeviceSynchronize());
  const auto results = arena.results();
  EXPECT_EQ(results[1], results[0]);
  EXPECT_EQ(results[2], results[0]);
  EXPECT_EQ(results[4], results[3]);
  for (auto& stream : streams) cudaStreamDestroy(stream);
}
#endif

}  // namespace
}  // namespace moxie::testing
