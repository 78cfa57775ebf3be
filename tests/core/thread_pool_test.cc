#include "moxie/core/base/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>

#include "moxie/core/base/check.h"

namespace moxie {
namespace {

TEST(ThreadPool, CoversEveryIndexOnce) {
  ThreadPool pool(3);
  for (const int64_t count : {0, 1, 2, 7, 100, 10'000}) {
    std::vector<std::atomic<int>> hits(count);
    pool.run(count, 3, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) ++hits[i];
    });
    for (const auto& hit : hits) ASSERT_EQ(hit, 1);
  }
}

TEST(ThreadPool, ServesManyRunsInARow) {
  ThreadPool pool(4);
  std::atomic<int64_t> sum{0};
  for (int i = 0; i < 2'000; ++i)
    pool.run(16, 1, [&](int64_t begin, int64_t end) { sum += end - begin; });
  EXPECT_EQ(sum, 32'000);
}

TEST(ThreadPool, GivesNoRangeShorterThanTheGrainButTheLast) {
  ThreadPool pool(4);
  std::atomic<int> small{0};
  pool.run(1'003, 100, [&](int64_t begin, int64_t end) { small += end - begin < 100; });
  EXPECT_LE(small, 1);
}

TEST(ThreadPool, HandsAnExceptionToTheCaller) {
  ThreadPool pool(2);
  EXPECT_THROW(pool.run(100, 1, [](int64_t, int64_t) { throw std::runtime_error("no"); }),
               std::runtime_error);
  std::atomic<int64_t> sum{0};
  pool.run(100, 1, [&](int64_t begin, int64_t end) { sum += end - begin; });
  EXPECT_EQ(sum, 100);  // and is fit for use afterwards
}

TEST(ThreadPool, RefusesToHaveNoThread) { EXPECT_THROW(ThreadPool(0), Error); }

}  // namespace
}  // namespace moxie
