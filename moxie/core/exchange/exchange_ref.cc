// The spec as loops. Ranks are threads or processes of one machine.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "moxie/core/base/parallel.h"
#include "moxie/core/exchange/backends.h"
#include "moxie/core/format/values.h"

namespace moxie::ref {
namespace {

constexpr int kNanByte = 0xff;  // NaN in e4m3, e8m0, bf16 and f32 alike

template <class T>
T* region(const SharedMemory& memory, int64_t rank, int64_t offset) {
  return reinterpret_cast<T*>(memory.base[static_cast<size_t>(rank)] + offset);
}

Meeting& meeting(const SharedMemory& memory, int64_t rank) {
  return *region<Meeting>(memory, rank, 0);
}

Failure failure(const SharedMemory& memory) {
  return static_cast<Failure>(meeting(memory, memory.rank).failure);
}

void fail(const SharedMemory& memory, Failure failure, Status status) {
  Meeting& own = meeting(memory, memory.rank);
  if (own.failure != 0) return;
  own.failure = static_cast<uint64_t>(failure);
  status.failure = static_cast<int64_t>(failure);
  *memory.status = status;
}

// A barrier of all ranks. A rank that has failed does not wait, and tells the others.
void meet(const SharedMemory& memory, Step step) {
  const auto rank = static_cast<size_t>(memory.rank);
  Meeting& own = meeting(memory, memory.rank);
  const uint64_t reached = word_of(barrier_of(own.passed) + 1, step);
  const auto tell = [&](uint64_t word) {
    for (int64_t r = 0; r < memory.capacity.ranks; ++r)
      std::atomic_ref(meeting(memory, r).arrived[rank]).store(word, std::memory_order_release);
  };
  if (own.failure != 0) return tell(own.passed | kFailedBit);
  tell(reached);
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::nanoseconds(memory.timeout_ns);
  const Status status{.step = static_cast<int64_t>(step)};
  for (int64_t r = 0; r < memory.capacity.ranks && own.failure == 0; ++r)
    for (;;) {
      const uint64_t word = std::atomic_ref(own.arrived[r]).load(std::memory_order_acquire);
      const Word said = read_word(word, reached);
      Status of_rank = status;
      of_rank.rank = r;
      of_rank.value = static_cast<int64_t>(step_of(word));
      if (said == Word::kFailed) fail(memory, Failure::kPeer, of_rank);
      if (said == Word::kElsewhere) fail(memory, Failure::kElsewhere, of_rank);
      if (said != Word::kEarlier) break;
      if (std::chrono::steady_clock::now() > deadline) {
        fail(memory, Failure::kStalled, of_rank);
        break;
      }
      std::this_thread::yield();
    }
  if (own.failure != 0) tell(reached | kFailedBit);
  own.passed = reached;
}

// The counts of all ranks, as they lie in this rank's memory.
struct Counts {
  const int32_t* all;
  Capacity capacity;

  int32_t of(int64_t rank, int64_t field) const { return all[rank * counts_of(capacity) + field]; }
  int64_t before(int64_t rank, int64_t field) const {
    int64_t sum = 0;
    for (int64_t r = 0; r < rank; ++r) sum += of(r, field);
    return sum;
  }
  int64_t total(int64_t field) const { return before(capacity.ranks, field); }
  int64_t rows_of(int64_t rank) const {
    const int64_t local = capacity.experts / capacity.ranks;
    int64_t sum = 0;
    for (int64_t e = rank * local; e < (rank + 1) * local; ++e) sum += total(e);
    return sum;
  }
  int64_t tokens_of(int64_t rank) const { return total(capacity.experts + rank); }
};

// Every rank finds the same failure.
void check_counts(const ExchangePlacesArgs& args, const Counts& counts) {
  const Capacity& capacity = args.memory.capacity;
  const int64_t signature = capacity.experts + capacity.ranks;
  const auto step = static_cast<int64_t>(Step::kCounts);
  for (int64_t r = 0; r < capacity.ranks; ++r) {
    if (counts.of(r, signature) != counts.of(0, signature))
      fail(args.memory, Failure::kSignature, {.step = step, .rank = r});
    if (const int64_t rows = counts.rows_of(r); rows > args.limits.rows)
      fail(args.memory, Failure::kRows,
           {.step = step, .rank = r, .value = rows, .limit = args.limits.rows});
    if (const int64_t tokens = counts.tokens_of(r); tokens > args.limits.tokens)
      fail(args.memory, Failure::kTokens,
           {.step = step, .rank = r, .value = tokens, .limit = args.limits.tokens});
  }
}

// After a failure: a row for every expert, of one token, so that NaN reaches every gradient.
void places_of_failure(const ExchangePlacesArgs& args) {
  const int64_t local = args.memory.capacity.experts / args.memory.capacity.ranks;
  int32_t* const experts = args.experts.data;
  std::fill_n(experts, expert_places(local), 0);
  for (int64_t i = 0; i < local; ++i)
    experts[i] = static_cast<int32_t>(min<int64_t>(i + 1, args.limits.rows));
  experts[3 * local] = static_cast<int32_t>(min<int64_t>(1, args.limits.tokens));
  std::fill_n(args.slots.data, numel(args.slots.shape), 0);
}

}  // namespace

void exchange_places(const ExchangePlacesArgs& args) {
  const KernelScope scope;
  const SharedMemory& memory = args.memory;
  const Capacity& capacity = memory.capacity;
  const Regions at = regions_of(capacity);
  const int64_t ranks = capacity.ranks, experts = capacity.experts, local = experts / ranks;
  const int64_t count = args.slots.dim(1), tokens = args.weights.dim(0);
  const int64_t top_k = args.weights.dim(1);
  int32_t* const expert = args.slots.data;
  int32_t *const row = expert + count, *const token = row + count;
  const auto begin_of = [&](int64_t e) { return e == 0 ? 0 : args.offs.data[e - 1]; };

  std::vector<int32_t> mine(static_cast<size_t>(counts_of(capacity)));
  for (int64_t e = 0; e < experts; ++e) mine[e] = args.offs.data[e] - begin_of(e);
  for (int64_t t = 0; t < tokens; ++t) {
    std::vector<int32_t> place(static_cast<size_t>(ranks), -1);
    for (int64_t slot = t * top_k; slot < (t + 1) * top_k; ++slot) {
      const int32_t* const end =
          std::upper_bound(args.offs.data, args.offs.data + experts - 1, args.row_of.data[slot]);
      expert[slot] = static_cast<int32_t>(end - args.offs.data);
      const int64_t rank = expert[slot] / local;
      const bool first = place[rank] < 0;
      if (first) place[rank] = mine[experts + rank]++;
      token[slot] = first ? place[rank] : -1 - place[rank];
    }
  }
  mine[experts + ranks] = args.signature;
  // Not after a failure: a peer may still read the counts of the barrier before.
  for (int64_t r = 0; r < ranks && failure(memory) == Failure::kNone; ++r)
    std::copy(mine.begin(), mine.end(),
              region<int32_t>(memory, r, at.counts) + memory.rank * counts_of(capacity));
  meet(memory, Step::kCounts);

  const Counts counts{region<int32_t>(memory, memory.rank, at.counts), capacity};
  if (failure(memory) == Failure::kNone) check_counts(args, counts);
  if (failure(memory) != Failure::kNone) return places_of_failure(args);
  std::vector<int64_t> shift(static_cast<size_t>(experts));
  for (int64_t e = 0, begin = 0; e < experts; ++e) {
    if (e % local == 0) begin = 0;
    const int64_t of_own = begin + counts.before(memory.rank, e);
    shift[e] = of_own - begin_of(e);
    const int64_t end = begin + counts.total(e), i = e - memory.rank * local;
    if (i >= 0 && i < local) {
      args.experts.data[i] = static_cast<int32_t>(end);
      args.experts.data[local + i] = static_cast<int32_t>(of_own);
      args.experts.data[2 * local + i] = static_cast<int32_t>(of_own + counts.of(memory.rank, e));
    }
    begin = end;
  }
  const int64_t unique = experts + memory.rank, own_begin = counts.before(memory.rank, unique);
  args.experts.data[3 * local] = static_cast<int32_t>(counts.tokens_of(memory.rank));
  args.experts.data[3 * local + 1] = static_cast<int32_t>(own_begin);
  args.experts.data[3 * local + 2] =
      static_cast<int32_t>(own_begin + counts.of(memory.rank, unique));
  for (int64_t slot = 0; slot < count; ++slot) {
    const int64_t rank = expert[slot] / local;
    const auto first = static_cast<int32_t>(counts.before(memory.rank, experts + rank));
    const int32_t place = first + (token[slot] < 0 ? -1 - token[slot] : token[slot]);
    if (rank == memory.rank) args.own.data[place - first] = static_cast<int32_t>(slot / top_k);
    row[slot] = static_cast<int32_t>(args.row_of.data[slot] + shift[expert[slot]]);
    token[slot] = token[slot] < 0 ? -1 - place : place;
    region<int32_t>(memory, rank, at.row_token)[row[slot]] = place;
    region<float>(memory, rank, at.row_weight)[row[slot]] = args.weights.data[slot];
  }
}

void send_tokens(const SendTokensArgs& args) {
  const SharedMemory& memory = args.memory;
  const int64_t offset = regions_of(memory.capacity).tokens;
  const int64_t local = memory.capacity.experts / memory.capacity.ranks;
  const auto& [data, scale] = args.tokens;
  const int64_t bytes = wire_row_bytes(data.dim(1), scale.dim(1));
  const int64_t count = args.slots.dim(1), tokens = data.dim(0);
  const int64_t top_k = tokens ? count / tokens : 0;
  for (int64_t slot = 0; failure(memory) == Failure::kNone && slot < count; ++slot) {
    const int32_t place = args.slots.data[2 * count + slot];
    const int64_t rank = args.slots.data[slot] / local;
    if (place < 0 || rank == memory.rank) continue;
    std::byte* const to = region<std::byte>(memory, rank, offset) + place * bytes;
    const int64_t t = slot / top_k;
    std::memcpy(to, data.data + t * data.dim(1), data.dim(1));
    if (scale.dim(1) > 0)
      std::memcpy(to + data.dim(1), scale.data + t * scale.dim(1), scale.dim(1));
  }
  meet(memory, args.step);
}

void send_quantized(const SendQuantizedArgs& args) {
  moxie::quantize(as_quantize(args), {.backend = Backend::kRef});
  send_tokens(as_send_tokens(args));
}

void receive_pairs(const ReceivePairsArgs& args) {
  const SharedMemory& memory = args.memory;
  const Regions at = regions_of(memory.capacity);
  const int64_t local = memory.capacity.experts / memory.capacity.ranks;
  const int64_t rows = args.experts.data[local - 1];
  const bool failed = failure(memory) != Failure::kNone;
  for (int64_t r = 0; r < args.limits.rows; ++r) {
    const bool inside = r < rows && !failed;
    args.row_token.data[r] = inside ? region<int32_t>(memory, memory.rank, at.row_token)[r] : 0;
    args.row_weight.data[r] = inside   ? region<float>(memory, memory.rank, at.row_weight)[r]
                              : failed ? NAN
                                       : 0.f;
  }
}

void gather_rows(const GatherRowsArgs& args) {
  const SharedMemory& memory = args.memory;
  const int64_t local = memory.capacity.experts / memory.capacity.ranks;
  const auto& [data, scale] = args.rows;
  const int64_t data_bytes = data.dim(1), scale_bytes = scale.dim(1);
  const int64_t bytes = wire_row_bytes(data_bytes, scale_bytes);
  const std::byte* const received =
      region<std::byte>(memory, memory.rank, regions_of(memory.capacity).tokens);
  const int64_t end = args.experts.data[args.row_token ? local - 1 : 3 * local];
  for (int64_t r = 0; r < min<int64_t>(end, data.dim(0)); ++r) {
    std::byte *const to = data.data + r * data_bytes, *const to_scale =
                                                          scale.data + r * scale_bytes;
    if (failure(memory) != Failure::kNone) {
      std::memset(to, kNanByte, data_bytes);
      if (scale_bytes > 0) std::memset(to_scale, kNanByte, scale_bytes);
      continue;
    }
    const int64_t t = args.row_token ? args.row_token->data[r] : r;
    const bool is_own =
        t >= args.experts.data[3 * local + 1] && t < args.experts.data[3 * local + 2];
    const int64_t here = !args.own ? t
                         : is_own  ? args.own->data[t - args.experts.data[3 * local + 1]]
                                   : -1;
    const std::byte* const from =
        here < 0 ? received + t * bytes : args.tokens.data.data + here * data_bytes;
    std::memcpy(to, from, data_bytes);
    if (scale_bytes > 0)
      std::memcpy(to_scale,
                  here < 0 ? from + data_bytes : args.tokens.scale.data + here * scale_bytes,
                  scale_bytes);
  }
}

void send_rows(const SendRowsArgs& args) {
  const SharedMemory& memory = args.memory;
  const Regions at = regions_of(memory.capacity);
  const int64_t local = memory.capacity.experts / memory.capacity.ranks;
  const bool goes = failure(memory) == Failure::kNone && memory.capacity.ranks > 1;
  for (int64_t i = 0, r = 0; goes && i < local; ++i)
    for (; r < args.experts.data[i]; ++r) {
      if (r >= args.experts.data[local + i] && r < args.experts.data[2 * local + i]) continue;
      if (args.rows) {
        const int64_t bytes = args.rows->dim(1) * bytes_of(args.rows->format);
        std::memcpy(region<std::byte>(memory, memory.rank, at.rows) + r * bytes,
                    static_cast<const std::byte*>(args.rows->data) + r * bytes, bytes);
      }
      if (args.of_pairs)
        region<float>(memory, memory.rank, at.row_gradient)[r] = args.of_pairs->data[r];
    }
  meet(memory, args.step);
}

void combine(const CombineArgs& args) {
  const KernelScope scope;
  const SharedMemory& memory = args.memory;
  const Regions at = regions_of(memory.capacity);
  const int64_t local = memory.capacity.experts / memory.capacity.ranks;
  const int64_t count = args.slots.dim(1);
  const bool failed = failure(memory) != Failure::kNone;
  const auto rank_of = [&](int64_t slot) { return args.slots.data[slot] / local; };
  const auto row_of = [&](int64_t slot) { return args.slots.data[count + slot]; };
  if (args.rows) {
    const int64_t tokens = args.x.dim(0), dim = args.x.dim(1), k = tokens ? count / tokens : 0;
    const auto rows_at = [&](int64_t rank) {
      ConstFloatView rows = *args.rows;
      if (rank != memory.rank) rows.data = region<std::byte>(memory, rank, at.rows);
      return rows;
    };
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t d = 0; d < dim; ++d) {
        float sum = failed ? NAN : 0.f;
        for (int64_t slot = t * k; !failed && slot < (t + 1) * k; ++slot) {
          const float value = value_at(rows_at(rank_of(slot)), row_of(slot) * dim + d);
          sum += args.weights ? args.weights->data[slot] * value : value;
        }
        put_value(args.x, t * dim + d, sum);
      }
  }
  if (args.of_pairs)
    for (int64_t slot = 0; slot < count; ++slot) {
      const float* const values = rank_of(slot) == memory.rank
                                      ? args.of_pairs->data
                                      : region<float>(memory, rank_of(slot), at.row_gradient);
      args.of_slots.data[slot] = failed ? NAN : values[row_of(slot)];
    }
}

void send_bias(const SendBiasArgs& args) {
  const SharedMemory& memory = args.memory;
  // Not after a failure: a peer may still read what backward left before.
  if (failure(memory) != Failure::kNone) return;
  const Regions at = regions_of(memory.capacity);
  const auto leave = [&](const auto& from, int64_t offset) {
    const auto bytes = static_cast<size_t>(from.dim(1)) * sizeof(*from.data);
    for (int64_t r = 0; r < from.dim(0); ++r)
      std::memcpy(region<std::byte>(memory, memory.rank, offset) + r * memory.capacity.bias_bytes,
                  from.data + r * from.dim(1), bytes);
  };
  leave(args.b2, at.b2);
  leave(args.sums, at.b2_sums);
}

void receive_bias(const ReceiveBiasArgs& args) {
  const SharedMemory& memory = args.memory;
  const Regions at = regions_of(memory.capacity);
  const int64_t local = memory.capacity.experts / memory.capacity.ranks;
  const bool failed = failure(memory) != Failure::kNone;
  // first: of the rows that each rank has left, the one to begin with.
  const auto collect = [&](const auto& to, int64_t offset, int64_t first) {
    const auto bytes = static_cast<size_t>(to.dim(1)) * sizeof(*to.data);
    for (int64_t r = 0; r < to.dim(0); ++r) {
      auto* const row = to.data + r * to.dim(1);
      const std::byte* const from = region<std::byte>(memory, r / local, offset) +
                                    (first + r % local) * memory.capacity.bias_bytes;
      if (failed)
        std::memset(row, kNanByte, bytes);
      else
        std::memcpy(row, from, bytes);
    }
  };
  collect(args.b2, at.b2, 0);
  collect(args.sums, at.b2_sums, memory.rank * local);
}

}  // namespace moxie::ref
