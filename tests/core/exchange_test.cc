// The exchange of ranks in one process. Results are compared with permute and unpermute of all
// tokens in one process.
#include "tests/support/exchange_world.h"

#include <gtest/gtest.h>

#include <cmath>

#include "moxie/core/permute/permute.h"
#include "moxie/core/quantize/quantize.h"

namespace moxie::testing {
namespace {

std::vector<Backend> backends() {
  std::vector<Backend> all{Backend::kRef};
  if (has_cuda_device()) all.push_back(Backend::kCuda);
  return all;
}

// Bytes of so many floats; std::memcmp takes no null pointers, which vectors without elements have.
bool are_equal(const float* a, const float* b, int64_t count) {
  return count == 0 || std::memcmp(a, b, static_cast<size_t>(count) * sizeof(float)) == 0;
}

const std::vector<std::vector<int64_t>> kWorlds{
    {21}, {300}, {13, 17}, {0, 9}, {270, 0, 5, 300}, {0, 0, 0, 0}};

TEST(Exchange, RowsAndSumsAreThoseOfOneProcess) {
  for (const Backend backend : backends())
    for (const auto& tokens : kWorlds) {
      const Sizes sizes{.tokens = tokens};
      const int64_t all = sizes.all_tokens(), slots = all * sizes.top_k;
      World world(sizes, backend, {.rows = slots + 3, .tokens = all + 2}, 1);
      each_rank(backend, sizes.ranks(), [&](int64_t r, const Exec& exec) {
        world.dispatch(r, exec);
        world.combine_all(r, exec);
      });
      const Route route = route_of(world.ids, 0, all, sizes);
      std::vector<float> y(all * sizes.dim), rows(slots * sizes.dim);
      permute({.x = {world.x.data(), Format::kF32, {all, sizes.dim}},
               .slot_of = {route.slot_of.data(), {slots}},
               .top_k = sizes.top_k,
               .rows = {rows.data(), Format::kF32, {slots, sizes.dim}}},
              {.backend = Backend::kRef});
      unpermute({.rows = {rows.data(), Format::kF32, {slots, sizes.dim}},
                 .row_of = {route.row_of.data(), {slots}},
                 .weights = View<const float>{world.weights.data(), {all, sizes.top_k}},
                 .x = {y.data(), Format::kF32, {all, sizes.dim}}},
                {.backend = Backend::kRef});
      const int64_t local = sizes.experts / sizes.ranks();
      for (int64_t r = 0; r < sizes.ranks(); ++r) {
        const Rank& own = world.ranks[r];
        ASSERT_EQ(own.memory.status->failure, 0);
        const int32_t begin = r == 0 ? 0 : route.offs[r * local - 1];
        for (int64_t i = 0; i < local; ++i)
          ASSERT_EQ(own.experts.data[i], route.offs[r * local + i] - begin);
        for (int64_t row = 0; row < own.experts.data[local - 1]; ++row) {
          const int64_t slot = route.slot_of[begin + row];
          EXPECT_EQ(own.row_weight.data[row], world.weights[slot]);
          EXPECT_EQ(static_cast<int>(own.row_scale.data[row * World::kScaleBytes]),
                    static_cast<int>(slot / sizes.top_k * World::kScaleBytes % 251));
        }
        EXPECT_TRUE(are_equal(own.rows.data, rows.data() + begin * sizes.dim,
                              own.experts.data[local - 1] * sizes.dim));
        EXPECT_TRUE(are_equal(own.y.data, y.data() + sizes.first(r) * sizes.dim,
                              sizes.tokens[r] * sizes.dim));
        EXPECT_TRUE(are_equal(own.of_slots.data, own.weights.data, sizes.tokens[r] * sizes.top_k));
      }
    }
}

// What the experts of each rank get of tokens in FP8: elements and scales, as bytes.
std::vector<std::vector<std::byte>> dispatched_fp8(World& world, Backend backend, Format format,
                                                   Block block, ScaleRule rule,
                                                   bool is_quantized_on_the_way) {
  const Sizes& sizes = world.sizes;
  const int64_t dim = sizes.dim, scales = ceil_div<int64_t>(dim, block.cols);
  const int64_t limit = world.limits.rows;
  Memory memory(backend);
  struct Tokens {
    ConstFloatView x;
    QuantizedOut sent;
    RowBytes<std::byte> rows;
  };
  std::vector<Tokens> ranks;
  for (int64_t r = 0; r < sizes.ranks(); ++r) {
    const int64_t tokens = sizes.tokens[r];
    const float* const x = world.ranks[r].x.data;
    auto* const rounded = memory.make<bf16>(tokens * dim);
    for (int64_t i = 0; i < tokens * dim; ++i) rounded[i] = to_bf16(x[i]);
    ranks.push_back({{x, format, {tokens, dim}},
                     {.block = block,
                      .qdata = {memory.make<e4m3>(tokens * dim), {tokens, dim}},
                      .scale = {memory.make<e8m0>(tokens * scales), {tokens, scales}}},
                     {{memory.make<std::byte>(limit * dim), {limit, dim}},
                      {memory.make<std::byte>(limit * scales), {limit, scales}}}});
    if (format == Format::kBf16) ranks.back().x.data = rounded;
  }
  each_rank(backend, sizes.ranks(), [&](int64_t r, const Exec& exec) {
    Rank& own = world.ranks[r];
    const auto& [x, sent, rows] = ranks[r];
    world.find_places(r, exec);
    const View<const int32_t> slots{own.slots.data, own.slots.shape};
    const RowBytes<const std::byte> bytes{
        {reinterpret_cast<const std::byte*>(sent.qdata.data), sent.qdata.shape},
        {reinterpret_cast<const std::byte*>(sent.scale.data), sent.scale.shape}};
    if (is_quantized_on_the_way) {
      send_quantized({.memory = own.memory,
                      .limits = world.limits,
                      .x = x,
                      .slots = slots,
                      .rule = rule,
                      .tokens = sent},
                     exec);
    } else {
      quantize({.x = x, .rowwise = sent, .rule = rule}, exec);
      send_tokens({.memory = own.memory, .limits = world.limits, .tokens = bytes, .slots = slots},
                  exec);
    }
    world.gather(r, bytes, rows, exec);
    world.combine_all(r, exec);  // behind its barrier peers have read
  });
  std::vector<std::vector<std::byte>> made;
  for (int64_t r = 0; r < sizes.ranks(); ++r) {
    const int64_t count = world.ranks[r].experts.data[sizes.experts / sizes.ranks() - 1];
    const auto& [data, scale] = ranks[r].rows;
    made.emplace_back(data.data, data.data + count * dim);
    made.back().insert(made.back().end(), scale.data, scale.data + count * scales);
  }
  return made;
}

TEST(Exchange, TokensQuantizedOnTheWayAreThoseQuantizedBefore) {
  for (const Backend backend : backends())
    for (const size_t which : {0, 2, 4})
      for (const int64_t dim : {40, 256, 400})
        for (const int64_t cols : {32, 128})
          for (const Format format : {Format::kF32, Format::kBf16})
            for (const ScaleRule rule : {ScaleRule::kRceil, ScaleRule::kEven}) {
              const Sizes sizes{.tokens = kWorlds[which], .dim = dim};
              const int64_t all = sizes.all_tokens();
              std::vector<std::vector<std::vector<std::byte>>> results;
              for (const bool on_the_way : {false, true}) {
                World world(sizes, backend, {.rows = all * sizes.top_k + 3, .tokens = all + 2}, 5);
                world.spoil_x();
                results.push_back(dispatched_fp8(world, backend, format,
                                                 {1, static_cast<int>(cols)}, rule, on_the_way));
              }
              ASSERT_EQ(results[0], results[1])
                  << sizes.ranks() << " ranks, dim " << dim << ", block " << cols << ", "
                  << name(format) << ", rule " << static_cast<int>(rule);
            }
}

TEST(Exchange, ATokenGoesToARankOnce) {
  for (const Backend backend : backends()) {
    const Sizes sizes{.tokens = {40, 50}};
    World world(sizes, backend, {.rows = 270, .tokens = 90}, 2);
    each_rank(backend, 2, [&](int64_t r, const Exec& exec) { world.dispatch(r, exec); });
    for (int64_t r = 0; r < 2; ++r) {
      int64_t unique = 0;
      for (int64_t t = 0; t < 90; ++t) {
        const int32_t* const ids = world.ids.data() + t * sizes.top_k;
        unique += std::any_of(ids, ids + sizes.top_k, [&](int32_t e) { return e / 4 == r; });
      }
      EXPECT_EQ(world.ranks[r].experts.data[3 * 4], unique);
    }
  }
}

TEST(Exchange, TooManyRowsOrTokensFailOnEveryRankAndResultsAreNan) {
  for (const Backend backend : backends())
    for (const ExchangeLimits limits :
         {ExchangeLimits{.rows = 100, .tokens = 90}, ExchangeLimits{.rows = 270, .tokens = 60}}) {
      const Sizes sizes{.tokens = {40, 50}};
      World world(sizes, backend, limits, 3);
      each_rank(backend, 2, [&](int64_t r, const Exec& exec) {
        world.dispatch(r, exec);
        world.combine_all(r, exec);
      });
      for (const Rank& own : world.ranks) {
        const Status& status = *own.memory.status;
        EXPECT_EQ(static_cast<Failure>(status.failure),
                  limits.rows == 100 ? Failure::kRows : Failure::kTokens);
        EXPECT_EQ(status.rank, 0);
        EXPECT_EQ(status.limit, limits.rows == 100 ? 100 : 60);
        EXPECT_GT(status.value, status.limit);
        for (int64_t i = 0; i < own.y.dim(0) * sizes.dim; ++i)
          ASSERT_TRUE(std::isnan(own.y.data[i]));
        for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(own.experts.data[i], i + 1);
        for (int64_t i = 0; i < 4 * sizes.dim; ++i) ASSERT_TRUE(std::isnan(own.rows.data[i]));
        for (int64_t i = 0; i < own.of_slots.dim(0) * sizes.top_k; ++i)
          ASSERT_TRUE(std::isnan(own.of_slots.data[i]));
      }
    }
}

// Each rank's b2 and sums say whose they are; `first` lets exchanges differ. Returns whether every
// rank has received what it should, or NaN everywhere.
bool bias_arrives(World& world, Backend backend, Memory& memory, int first, bool expects_nan) {
  const int64_t ranks = world.sizes.ranks(), experts = world.sizes.experts, local = experts / ranks;
  const int64_t dim = world.sizes.dim, bytes = 2 * dim;
  const auto b2_at = [&](int64_t expert, int64_t i) { return (first + expert * 7 + i) % 251; };
  const auto sum_at = [&](int64_t rank, int64_t expert, int64_t d) {
    return static_cast<float>(first + rank * 1000 + expert * 100 + d);
  };
  std::vector<View<std::byte>> b2, all_b2;
  std::vector<View<float>> sums, all_sums;
  for (int64_t r = 0; r < ranks; ++r) {
    b2.push_back({memory.make<std::byte>(local * bytes), {local, bytes}});
    sums.push_back({memory.make<float>(experts * dim), {experts, dim}});
    all_b2.push_back({memory.make<std::byte>(experts * bytes), {experts, bytes}});
    all_sums.push_back({memory.make<float>(experts * dim), {experts, dim}});
    for (int64_t i = 0; i < local * bytes; ++i)
      b2[r].data[i] = static_cast<std::byte>(b2_at(r * local + i / bytes, i % bytes));
    for (int64_t i = 0; i < experts * dim; ++i) sums[r].data[i] = sum_at(r, i / dim, i % dim);
  }
  each_rank(backend, ranks, [&](int64_t r, const Exec& exec) {
    world.exchange_bias(r, {b2[r].data, b2[r].shape}, {sums[r].data, sums[r].shape}, all_b2[r],
                        all_sums[r], exec);
    world.combine_all(r, exec);  // behind its barrier peers have read
  });
  bool arrived = true;
  for (int64_t r = 0; r < ranks; ++r) {
    for (int64_t i = 0; i < experts * bytes; ++i)
      arrived &= static_cast<int64_t>(all_b2[r].data[i]) ==
                 (expects_nan ? 0xff : b2_at(i / bytes, i % bytes));
    for (int64_t i = 0; i < experts * dim; ++i) {
      const float have = all_sums[r].data[i];
      const int64_t from = i / dim / local, expert = r * local + i / dim % local;
      arrived &= expects_nan ? std::isnan(have) : have == sum_at(from, expert, i % dim);
    }
  }
  return arrived;
}

TEST(Exchange, BiasesAndTheirSumsGoToEveryRank) {
  for (const Backend backend : backends())
    for (const auto& tokens : kWorlds) {
      const Sizes sizes{.tokens = tokens, .dim = 13};
      const int64_t all = sizes.all_tokens();
      World world(sizes, backend, {.rows = all * sizes.top_k + 8, .tokens = all}, 6);
      Memory memory(backend);
      each_rank(backend, sizes.ranks(), [&](int64_t r, const Exec& exec) {
        world.dispatch(r, exec);
        world.combine_all(r, exec);
      });
      for (int first = 0; first < 3; ++first)
        EXPECT_TRUE(bias_arrives(world, backend, memory, first, /*expects_nan=*/false));
    }
}

TEST(Exchange, AfterAFailureBiasesAreNan) {
  for (const Backend backend : backends()) {
    World world({.tokens = {40, 50}}, backend, {.rows = 100, .tokens = 90}, 3);
    Memory memory(backend);
    each_rank(backend, 2, [&](int64_t r, const Exec& exec) { world.dispatch(r, exec); });
    EXPECT_TRUE(bias_arrives(world, backend, memory, 0, /*expects_nan=*/true));
  }
}

TEST(Exchange, ARankThatDoesNotComeIsNamed) {
  for (const Backend backend : backends()) {
    const Sizes sizes{.tokens = {4, 4}};
    World world(sizes, backend, {.rows = 24, .tokens = 8}, 4);
    world.ranks[0].memory.timeout_ns = 50'000'000;
    each_rank(backend, 1, [&](int64_t r, const Exec& exec) { world.dispatch(r, exec); });
    const Status& status = *world.ranks[0].memory.status;
    EXPECT_EQ(static_cast<Failure>(status.failure), Failure::kStalled);
    EXPECT_EQ(static_cast<Step>(status.step), Step::kCounts);
    EXPECT_EQ(status.rank, 1);
  }
}

TEST(Exchange, AWordOfAPeerCountsForBarriersItHasPassedBeforeItFailed) {
  const uint64_t own = word_of(5, Step::kX), early = word_of(4, Step::kCounts);
  EXPECT_EQ(read_word(early, own), Word::kEarlier);
  EXPECT_EQ(read_word(own, own), Word::kArrived);
  EXPECT_EQ(read_word(word_of(6, Step::kY), own), Word::kArrived);
  EXPECT_EQ(read_word(own | kFailedBit, own), Word::kArrived);
  EXPECT_EQ(read_word(early | kFailedBit, own), Word::kFailed);
  EXPECT_EQ(read_word(word_of(5, Step::kDy), own), Word::kElsewhere);
  EXPECT_EQ(read_word(word_of(5, Step::kDy) | kFailedBit, own), Word::kElsewhere);
}

TEST(Exchange, RefusesSizesThatDoNotFit) {
  const Sizes sizes{.tokens = {4}};
  World world(sizes, Backend::kRef, {.rows = 12, .tokens = 4}, 5);
  world.limits.rows = 13;
  EXPECT_THROW(world.dispatch(0, {.backend = Backend::kRef}), Error);
  world.limits.rows = 12;
  world.ranks[0].offs.data[sizes.experts - 1] = 11;
  EXPECT_THROW(world.dispatch(0, {.backend = Backend::kRef}), Error);
  std::vector<float> sums(sizes.experts * 41);
  const SharedMemory& memory = world.ranks[0].memory;
  for (const Shape& shape : {Shape{sizes.experts, 41}, Shape{sizes.experts - 1, 40}})
    EXPECT_THROW(
        send_bias({.memory = memory, .b2 = {nullptr, {0, 0}}, .sums = {sums.data(), shape}},
                  {.backend = Backend::kRef}),
        Error);
}

}  // namespace
}  // namespace moxie::testing
