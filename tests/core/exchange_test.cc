// The exchange of ranks in one process: on ref every rank is a thread, on a GPU a stream. Results
// are compared with permute and unpermute of all tokens in one process.
#include "moxie/core/exchange/exchange.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <thread>

#include "moxie/core/permute/permute.h"
#include "moxie/core/route/route.h"
#include "tests/support/backends.h"
#include "tests/support/tensors.h"

namespace moxie::testing {
namespace {

// Memory that the host and the backend's ops reach.
class Memory {
 public:
  explicit Memory(Backend backend) : backend_(backend) {}
  ~Memory() {
    for (void* block : blocks_) release(block);
  }
  template <class T>
  T* make(int64_t count, int fill = 0xa5) {
    const auto bytes = static_cast<size_t>(max<int64_t>(count, 1)) * sizeof(T);
    blocks_.push_back(allocate(bytes));
    std::memset(blocks_.back(), fill, bytes);
    return static_cast<T*>(blocks_.back());
  }
  template <class T>
  View<const T> of(const std::vector<T>& values, Shape shape) {
    T* const data = make<T>(static_cast<int64_t>(values.size()));
    std::copy(values.begin(), values.end(), data);
    return {data, shape};
  }

 private:
#ifdef MOXIE_CUDA
  void* allocate(size_t bytes) {
    if (backend_ != Backend::kCuda) return ::operator new(bytes);
    void* data = nullptr;
    check_device("cudaMallocHost", cudaMallocHost(&data, bytes));  // one address for both
    return data;
  }
  void release(void* data) {
    if (backend_ != Backend::kCuda) return ::operator delete(data);
    cudaFreeHost(data);
  }
#else
  void* allocate(size_t bytes) { return ::operator new(bytes); }
  void release(void* data) { ::operator delete(data); }
#endif

  Backend backend_;
  std::vector<void*> blocks_;
};

// Runs every rank's ops. On a GPU streams of one process wait for each other, so kernels must have
// been loaded before: run one rank first.
void each_rank(Backend backend, int64_t ranks,
               const std::function<void(int64_t, const Exec&)>& body) {
  if (backend != Backend::kCuda) {
    std::vector<std::thread> threads;
    for (int64_t r = 0; r < ranks; ++r)
      threads.emplace_back([&, r] { body(r, {.backend = backend}); });
    for (std::thread& thread : threads) thread.join();
    return;
  }
#ifdef MOXIE_CUDA
  std::vector<cudaStream_t> streams(static_cast<size_t>(ranks));
  for (cudaStream_t& stream : streams)
    check_device("stream", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (int64_t r = 0; r < ranks; ++r)
    body(r, {.backend = backend, .stream = streams[static_cast<size_t>(r)]});
  check_device("streams", cudaDeviceSynchronize());
  for (cudaStream_t stream : streams) cudaStreamDestroy(stream);
#endif
}

struct Sizes {
  std::vector<int64_t> tokens;  // of each rank
  int64_t experts = 8, top_k = 3, dim = 40;
  int64_t ranks() const { return static_cast<int64_t>(tokens.size()); }
  int64_t all_tokens() const { return std::accumulate(tokens.begin(), tokens.end(), int64_t{0}); }
  int64_t first(int64_t rank) const {
    return std::accumulate(tokens.begin(), tokens.begin() + rank, int64_t{0});
  }
};

// A route of all tokens, or of some of them.
struct Route {
  std::vector<int32_t> offs, slot_of, row_of;
};
Route route_of(const std::vector<int32_t>& ids, int64_t first, int64_t tokens, const Sizes& sizes) {
  const int64_t slots = tokens * sizes.top_k;
  const std::vector<int32_t> own(ids.begin() + first * sizes.top_k,
                                 ids.begin() + first * sizes.top_k + slots);
  Route made{std::vector<int32_t>(sizes.experts), std::vector<int32_t>(slots),
             std::vector<int32_t>(slots)};
  route({.ids = {own.data(), {tokens, sizes.top_k}},
         .offs = {made.offs.data(), {sizes.experts}},
         .slot_of = {made.slot_of.data(), {slots}},
         .row_of = {made.row_of.data(), {slots}},
         .workspace = {nullptr, {0}}},
        {.backend = Backend::kRef});
  return made;
}

// One rank's tensors.
struct Rank {
  SharedMemory memory = {};
  View<int32_t> offs = {}, row_of = {};
  View<const float> x = {}, weights = {};
  View<const std::byte> scale = {};
  View<int32_t> slots = {}, experts = {}, workspace = {}, row_token = {};
  View<float> row_weight = {}, rows = {}, y = {}, of_slots = {};
  View<std::byte> row_scale = {};
};

struct World {
  Sizes sizes;
  ExchangeLimits limits;
  Capacity capacity;
  std::vector<int32_t> ids;
  std::vector<float> x, weights;
  std::vector<Rank> ranks;
  Memory memory;

  World(const Sizes& of, Backend backend, ExchangeLimits limit, unsigned seed)
      : sizes(of), limits(limit), memory(backend) {
    std::mt19937 random(seed);
    const int64_t all = sizes.all_tokens(), local = sizes.experts / sizes.ranks();
    for (int64_t t = 0; t < all; ++t) {
      std::vector<int32_t> experts(sizes.experts);
      std::iota(experts.begin(), experts.end(), 0);
      std::shuffle(experts.begin(), experts.end(), random);
      ids.insert(ids.end(), experts.begin(), experts.begin() + sizes.top_k);
    }
    const auto values = [&](int64_t count) {
      std::vector<float> made(count);
      for (float& value : made) value = static_cast<float>(random() % 2001) / 1000.f - 1.f;
      return made;
    };
    x = values(all * sizes.dim), weights = values(all * sizes.top_k);
    capacity = {.ranks = sizes.ranks(),
                .experts = sizes.experts,
                .rows = limits.rows,
                .token_bytes = limits.tokens * wire_row_bytes(sizes.dim * 4, kScaleBytes),
                .row_bytes = limits.rows * sizes.dim * 4,
                .bias_bytes = sizes.dim * 4};
    std::array<std::byte*, kMaxRanks> base{};
    for (int64_t r = 0; r < sizes.ranks(); ++r) {
      base[r] = memory.make<std::byte>(regions_of(capacity).bytes);
      std::memset(base[r], 0, sizeof(Meeting));
    }
    for (int64_t r = 0; r < sizes.ranks(); ++r) {
      const int64_t tokens = sizes.tokens[r], slots = tokens * sizes.top_k, first = sizes.first(r);
      Rank rank{.memory = {.capacity = capacity,
                           .rank = r,
                           .base = base,
                           .status = memory.make<Status>(1, 0),
                           .timeout_ns = 60'000'000'000}};
      const Route route = route_of(ids, first, tokens, sizes);
      rank.offs = {memory.make<int32_t>(sizes.experts), {sizes.experts}};
      std::copy(route.offs.begin(), route.offs.end(), rank.offs.data);
      rank.row_of = {memory.make<int32_t>(slots), {slots}};
      std::copy(route.row_of.begin(), route.row_of.end(), rank.row_of.data);
      const std::vector<float> own(x.begin() + first * sizes.dim,
                                   x.begin() + (first + tokens) * sizes.dim);
      rank.x = memory.of(own, {tokens, sizes.dim});
      rank.weights = memory.of(std::vector<float>(weights.begin() + first * sizes.top_k,
                                                  weights.begin() + first * sizes.top_k + slots),
                               {tokens, sizes.top_k});
      std::vector<std::byte> scales(tokens * kScaleBytes);
      for (size_t i = 0; i < scales.size(); ++i)
        scales[i] = static_cast<std::byte>((first * kScaleBytes + i) % 251);
      rank.scale = memory.of(scales, {tokens, kScaleBytes});
      rank.slots = {memory.make<int32_t>(3 * slots), {3, slots}};
      rank.experts = {memory.make<int32_t>(expert_places(local)), {expert_places(local)}};
      const int64_t workspace = exchange_workspace(tokens, sizes.ranks(), sizes.experts);
      rank.workspace = {memory.make<int32_t>(workspace), {workspace}};
      rank.row_token = {memory.make<int32_t>(limits.rows), {limits.rows}};
      rank.row_weight = {memory.make<float>(limits.rows), {limits.rows}};
      rank.rows = {memory.make<float>(limits.rows * sizes.dim), {limits.rows, sizes.dim}};
      rank.row_scale = {memory.make<std::byte>(limits.rows * kScaleBytes),
                        {limits.rows, kScaleBytes}};
      rank.y = {memory.make<float>(slots * sizes.dim), {tokens, sizes.dim}};
      rank.of_slots = {memory.make<float>(slots), {tokens, sizes.top_k}};
      ranks.push_back(std::move(rank));
    }
  }

  static constexpr int64_t kScaleBytes = 5;

  static RowBytes<const std::byte> as_bytes(const View<const float>& matrix,
                                            const View<const std::byte>& scale) {
    return {{reinterpret_cast<const std::byte*>(matrix.data), {matrix.dim(0), matrix.dim(1) * 4}},
            scale};
  }
  static RowBytes<std::byte> as_bytes(const View<float>& matrix, const View<std::byte>& scale) {
    return {{reinterpret_cast<std::byte*>(matrix.data), {matrix.dim(0), matrix.dim(1) * 4}}, scale};
  }

  void dispatch(int64_t r, const Exec& exec) {
    Rank& own = ranks[r];
    const View<const int32_t> slots{own.slots.data, own.slots.shape};
    const View<const int32_t> experts{own.experts.data, own.experts.shape};
    exchange_places({.memory = own.memory,
                     .limits = limits,
                     .offs = {own.offs.data, own.offs.shape},
                     .row_of = {own.row_of.data, own.row_of.shape},
                     .weights = own.weights,
                     .signature = 7,
                     .slots = own.slots,
                     .experts = own.experts,
                     .workspace = own.workspace},
                    exec);
    send_tokens({.memory = own.memory,
                 .limits = limits,
                 .tokens = as_bytes(own.x, own.scale),
                 .slots = slots,
                 .step = Step::kX},
                exec);
    receive_pairs({.memory = own.memory,
                   .limits = limits,
                   .experts = experts,
                   .row_token = own.row_token,
                   .row_weight = own.row_weight},
                  exec);
    gather_rows({.memory = own.memory,
                 .experts = experts,
                 .row_token = View<const int32_t>{own.row_token.data, own.row_token.shape},
                 .rows = as_bytes(own.rows, own.row_scale)},
                exec);
  }
  // The experts' b2, two bytes an element, and sums go around with the tokens of backward.
  void exchange_bias(int64_t r, const View<const std::byte>& b2, const View<const float>& sums,
                     const View<std::byte>& all_b2, const View<float>& all_sums, const Exec& exec) {
    Rank& own = ranks[r];
    send_bias({.memory = own.memory, .b2 = b2, .sums = sums}, exec);
    send_tokens({.memory = own.memory,
                 .limits = limits,
                 .tokens = as_bytes(own.x, own.scale),
                 .slots = {own.slots.data, own.slots.shape},
                 .step = Step::kDy},
                exec);
    receive_bias({.memory = own.memory, .b2 = all_b2, .sums = all_sums}, exec);
  }
  // What came as tokens goes back as rows, with the weight of a row as its value.
  void combine_all(int64_t r, const Exec& exec) {
    Rank& own = ranks[r];
    const ConstFloatView rows{own.rows.data, Format::kF32, own.rows.shape};
    const View<const float> values{own.row_weight.data, own.row_weight.shape};
    send_rows({.memory = own.memory,
               .experts = {own.experts.data, own.experts.shape},
               .rows = rows,
               .of_pairs = values,
               .step = Step::kY},
              exec);
    combine({.memory = own.memory,
             .limits = limits,
             .slots = {own.slots.data, own.slots.shape},
             .rows = rows,
             .of_pairs = values,
             .weights = own.weights,
             .x = {own.y.data, Format::kF32, own.y.shape},
             .of_slots = own.of_slots},
            exec);
  }
};

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
