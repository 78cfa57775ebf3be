// The exchange of ranks in one process, for tests: on ref every rank is a thread, on a GPU a
// stream.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "moxie/core/exchange/exchange.h"
#include "moxie/core/route/route.h"
#include "tests/support/backends.h"
#include "tests/support/tensors.h"

namespace moxie::testing {

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

// On a GPU the ranks are streams of one process, whose kernels wait for each other. CUDA would load
// a kernel at its first launch, and wait for all streams to do so. Set before CUDA starts.
[[maybe_unused]] inline const int kernels_are_loaded_at_once =
    setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/1);

// Runs every rank's ops.
inline void each_rank(Backend backend, int64_t ranks,
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
inline Route route_of(const std::vector<int32_t>& ids, int64_t first, int64_t tokens,
                      const Sizes& sizes) {
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
  View<int32_t> slots = {}, experts = {}, own = {}, workspace = {}, row_token = {};
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
      rank.own = {memory.make<int32_t>(tokens), {tokens}};
      // As torch's empty tensors: a null pointer must not mean that an argument is absent.
      if (tokens == 0) rank.own.data = nullptr, rank.x.data = nullptr, rank.scale.data = nullptr;
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

  // Some elements of x become NaN, infinite, zero or tiny.
  void spoil_x() {
    const float values[] = {NAN, INFINITY, -INFINITY, 0.f, -0.f, 1e-38f, 3e38f};
    for (Rank& rank : ranks) {
      auto* const data = const_cast<float*>(rank.x.data);
      for (int64_t i = 0; i < numel(rank.x.shape); i += 1 + i % 331) data[i] = values[i % 7];
    }
  }

  void find_places(int64_t r, const Exec& exec) {
    Rank& own = ranks[r];
    exchange_places({.memory = own.memory,
                     .limits = limits,
                     .offs = {own.offs.data, own.offs.shape},
                     .row_of = {own.row_of.data, own.row_of.shape},
                     .weights = own.weights,
                     .signature = 7,
                     .slots = own.slots,
                     .experts = own.experts,
                     .own = own.own,
                     .workspace = own.workspace},
                    exec);
  }
  void gather(int64_t r, const RowBytes<const std::byte>& tokens, const RowBytes<std::byte>& rows,
              const Exec& exec) {
    Rank& own = ranks[r];
    const View<const int32_t> experts{own.experts.data, own.experts.shape};
    receive_pairs({.memory = own.memory,
                   .limits = limits,
                   .experts = experts,
                   .row_token = own.row_token,
                   .row_weight = own.row_weight},
                  exec);
    gather_rows({.memory = own.memory,
                 .tokens = tokens,
                 .own = View<const int32_t>{own.own.data, own.own.shape},
                 .experts = experts,
                 .row_token = View<const int32_t>{own.row_token.data, own.row_token.shape},
                 .rows = rows},
                exec);
  }
  void dispatch(int64_t r, const Exec& exec) {
    Rank& own = ranks[r];
    find_places(r, exec);
    send_tokens({.memory = own.memory,
                 .limits = limits,
                 .tokens = as_bytes(own.x, own.scale),
                 .slots = {own.slots.data, own.slots.shape},
                 .step = Step::kX},
                exec);
    gather(r, as_bytes(own.x, own.scale), as_bytes(own.rows, own.row_scale), exec);
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

}  // namespace moxie::testing
