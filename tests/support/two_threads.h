// An implementation of Parallel for tests: splits work into up to eight ranges, and runs every
// other one on a second thread.
#pragma once

#include <thread>

#include "moxie/core/base/exec.h"
#include "moxie/core/base/math.h"

namespace moxie::testing {

class TwoThreads final : public Parallel {
 public:
  void run(int64_t count, int64_t grain, const Body& body) override {
    const int64_t chunk = max(grain, ceil_div<int64_t>(count, 8));
    const auto every_other = [&](int64_t first) {
      for (int64_t begin = first * chunk; begin < count; begin += 2 * chunk)
        body(begin, min(begin + chunk, count));
    };
    if (chunk >= count) return every_other(0);
    std::thread second(every_other, 1);
    every_other(0);
    second.join();
  }
};

}  // namespace moxie::testing
