// The barrier of the exchange (barrier.cuh), run on a CPU: every rank is a thread of the host that
// runs the CTA of a GPU. Ranks come late, fail, or come to other steps.
#include "tests/support/cta_on_host.h"
// Must come after cta_on_host.h.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "moxie/core/exchange/barrier.cuh"

namespace moxie::testing {
namespace {

using cuda::Peers;

struct HostWords {
  static void store_release(uint64_t* to, uint64_t word) {
    std::atomic_ref(*to).store(word, std::memory_order_release);
  }
  static uint64_t load_acquire(const uint64_t* from) {
    CtaOnHost::instance().yield();
    std::this_thread::yield();
    return std::atomic_ref(*const_cast<uint64_t*>(from)).load(std::memory_order_acquire);
  }
  static uint64_t time() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<uint64_t>(std::chrono::nanoseconds(now).count());
  }
};

constexpr int64_t kSecond = 1'000'000'000;

// Memory of all ranks. Behind the head a rank has a word for each peer, which stands for all that
// peers write before a barrier.
class World {
 public:
  World(int ranks, int64_t timeout_ns)
      : status_(ranks), memory_(ranks), capacity_{.ranks = ranks, .experts = ranks} {
    for (auto& memory : memory_)
      memory.assign(regions_of(capacity_).bytes / sizeof(uint64_t) + kMaxRanks, 0);
    for (int r = 0; r < ranks; ++r) {
      SharedMemory shared{
          .capacity = capacity_, .rank = r, .status = &status_[r], .timeout_ns = timeout_ns};
      for (int p = 0; p < ranks; ++p)
        shared.base[p] = reinterpret_cast<std::byte*>(memory_[p].data());
      peers_.push_back(cuda::peers_of(shared));
    }
  }

  int ranks() const { return static_cast<int>(peers_.size()); }
  const Peers& peers(int rank) const { return peers_[rank]; }
  const Status& status(int rank) const { return status_[rank]; }
  Failure failure(int rank) const { return static_cast<Failure>(status_[rank].failure); }
  // What `from` has written for `rank`.
  uint64_t& note(int rank, int from) {
    return memory_[rank][regions_of(capacity_).bytes / sizeof(uint64_t) + from];
  }

  void meet(int rank, Step step) const {
    // Lanes of neighbours run in other orders.
    CtaOnHost::instance().run(cuda::kThreads, rank % 2 ? LaneOrder::kDown : LaneOrder::kUp,
                              [&] { cuda::meet_by<HostWords>(peers_[rank], step); });
  }
  void each_rank(const std::function<void(int)>& body) const {
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks(); ++r) threads.emplace_back(body, r);
    for (std::thread& thread : threads) thread.join();
  }

 private:
  std::vector<Status> status_;
  std::vector<std::vector<uint64_t>> memory_;
  Capacity capacity_;
  std::vector<Peers> peers_;
};

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

constexpr Step kLayer[] = {Step::kCounts, Step::kX, Step::kY, Step::kDy, Step::kDx};

TEST(Barrier, WhatPeersWroteBeforeItIsThereBehindIt) {
  for (const int ranks : {1, 2, 5, 40}) {  // 40 are more than a warp
    const uint64_t count = ranks > 5 ? 3 : 50;
    World world(ranks, 60 * kSecond);
    std::vector<int> wrong(ranks);
    world.each_rank([&](int rank) {
      for (uint64_t i = 1; i <= count; ++i) {
        if (i % ranks == static_cast<uint64_t>(rank)) sleep_ms(1);
        for (int p = 0; p < ranks; ++p) world.note(p, rank) = i;
        world.meet(rank, kLayer[i % 5]);
        for (int p = 0; p < ranks; ++p) wrong[rank] += world.note(rank, p) != i;
        world.meet(rank, kLayer[i % 5]);  // read before they write again
      }
    });
    for (int r = 0; r < ranks; ++r) {
      EXPECT_EQ(wrong[r], 0);
      EXPECT_EQ(world.failure(r), Failure::kNone);
    }
  }
}

TEST(Barrier, ARankThatDoesNotComeIsNamedAndFindsThatTheOthersHaveFailed) {
  World world(3, kSecond / 4);
  world.each_rank([&](int rank) {
    if (rank == 1) return;
    world.meet(rank, Step::kX);
    world.meet(rank, Step::kY);  // nobody waits any more
  });
  for (const int r : {0, 2}) {
    EXPECT_TRUE(world.failure(r) == Failure::kStalled || world.failure(r) == Failure::kPeer);
    EXPECT_EQ(static_cast<Step>(world.status(r).step), Step::kX);
    EXPECT_EQ(world.status(r).rank, world.failure(r) == Failure::kStalled ? 1 : 2 - r);
  }
  EXPECT_TRUE(world.failure(0) == Failure::kStalled || world.failure(2) == Failure::kStalled);
  // The late rank passes the barrier at which the others have failed, and no other.
  std::thread([&] { world.meet(1, Step::kX); }).join();
  EXPECT_EQ(world.failure(1), Failure::kNone);
  std::thread([&] { world.meet(1, Step::kY); }).join();
  EXPECT_EQ(world.failure(1), Failure::kPeer);
}

TEST(Barrier, RanksAtOtherStepsFailAllAndNameAStep) {
  World world(3, 60 * kSecond);
  world.each_rank([&](int rank) {
    for (const Step step : {Step::kCounts, Step::kX, Step::kY}) world.meet(rank, step);
    if (rank == 2) sleep_ms(5);
    world.meet(rank, rank == 1 ? Step::kCounts : Step::kDy);  // rank 1 left out a backward
  });
  for (int r = 0; r < 3; ++r) {
    EXPECT_EQ(world.failure(r), Failure::kElsewhere);
    EXPECT_EQ(world.status(r).rank == 1, r != 1);
    EXPECT_EQ(static_cast<Step>(world.status(r).value), r == 1 ? Step::kDy : Step::kCounts);
  }
}

TEST(Barrier, ARankThatHasFailedIsPassedOnceAndThenFailsTheOthers) {
  World world(3, 60 * kSecond);
  world.each_rank([&](int rank) {
    world.meet(rank, Step::kCounts);
    if (rank == 0) {
      cuda::fail(world.peers(0), Failure::kRows, {.rank = 2, .value = 7, .limit = 5});
      cuda::fail(world.peers(0), Failure::kTokens, {.rank = 1});  // the first is kept
    }
    world.meet(rank, Step::kX);
    world.meet(rank, Step::kY);
  });
  EXPECT_EQ(world.failure(0), Failure::kRows);
  EXPECT_EQ(world.status(0).value, 7);
  for (const int r : {1, 2}) {
    EXPECT_EQ(world.failure(r), Failure::kPeer);
    EXPECT_EQ(static_cast<Step>(world.status(r).step), Step::kX);
  }
}

// Ranks run the same steps, but at times one leaves out a step, fails or comes too late. Whoever
// has passed a barrier without a failure must know that every rank came to it, at the same step.
TEST(Barrier, WhoPassesWithoutFailureHasMetAllRanksAtThatStep) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    std::mt19937 random(seed);
    const int ranks = 2 + static_cast<int>(random() % 4), count = 12;
    const int odd_rank = static_cast<int>(random() % ranks);
    const int odd_step = static_cast<int>(random() % (count - 1));  // others follow
    const auto kind = random() % 4;  // nothing, leaves a step out, fails, is late
    const int late_ms = 5 + static_cast<int>(random() % 10);
    World world(ranks, kind == 3 ? kSecond / 200 : 60 * kSecond);
    std::vector<std::vector<Step>> came(ranks);
    std::vector<size_t> passed(ranks);
    world.each_rank([&](int rank) {
      std::mt19937 own(seed * 100 + rank);
      for (int i = 0; i < count; ++i) {
        if (own() % 8 == 0) sleep_ms(1);
        if (rank == odd_rank && i == odd_step) {
          if (kind == 1) continue;
          if (kind == 2) cuda::fail(world.peers(rank), Failure::kRows, {.rank = rank});
          if (kind == 3) sleep_ms(late_ms);
        }
        const bool had_failed = world.failure(rank) != Failure::kNone;
        if (!had_failed) came[rank].push_back(kLayer[i % 5]);
        world.meet(rank, kLayer[i % 5]);
        if (world.failure(rank) == Failure::kNone) passed[rank] = came[rank].size();
      }
    });
    for (int r = 0; r < ranks; ++r) {
      SCOPED_TRACE(::testing::Message() << "seed " << seed << ", kind " << kind << ", rank " << r);
      for (size_t i = 0; i < passed[r]; ++i)
        for (int p = 0; p < ranks; ++p)
          ASSERT_TRUE(i < came[p].size() && came[p][i] == came[r][i]) << "barrier " << i;
      // Whether a late rank makes others fail is a matter of time.
      if (kind < 3) {
        EXPECT_EQ(world.failure(r) == Failure::kNone, kind == 0);
      }
    }
  }
}

}  // namespace
}  // namespace moxie::testing
