// Compares every backend with the reference on random problems, byte for byte.
// MOXIE_FUZZ_CASES sets how many (default 100000), MOXIE_FUZZ_FIRST the number of the first, so
// that `MOXIE_FUZZ_FIRST=1234 MOXIE_FUZZ_CASES=1 fuzz_test` repeats a failure.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "tests/support/backends.h"
#include "tests/support/cases.h"
#include "tests/support/two_threads.h"

namespace moxie::testing {
namespace {

uint64_t setting(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  if (!text) return otherwise;
  char* end = nullptr;
  const uint64_t value = std::strtoull(text, &end, 10);
  if (end == text || *end || value == 0) {
    std::fprintf(stderr, "%s must be a positive number, got '%s'\n", name, text);
    std::exit(2);
  }
  return value;
}

// Describes the first byte that differs between two lists of outputs; empty if none does.
std::string difference(const std::vector<std::vector<uint8_t>>& expected,
                       const std::vector<std::vector<uint8_t>>& actual) {
  if (expected.size() != actual.size()) return "another number of outputs";
  for (size_t o = 0; o < expected.size(); ++o)
    for (size_t i = 0; i < expected[o].size(); ++i)
      if (expected[o][i] != actual[o][i])
        return "output " + std::to_string(o) + " byte " + std::to_string(i) + " of " +
               std::to_string(expected[o].size()) + ": expected " + std::to_string(expected[o][i]) +
               ", got " + std::to_string(actual[o][i]);
  return "";
}

struct Tally {
  std::atomic<uint64_t> run{0}, large{0}, failed{0};
  std::mutex mutex;
  std::string report;

  void add(uint64_t number, const Case& c, const std::string& backend, const std::string& what) {
    ++run;
    large += c.elements > 64 * 1024;
    if (what.empty()) return;
    std::lock_guard lock(mutex);
    if (++failed <= 10)
      report += "case " + std::to_string(number) + " on " + backend + ": " + c.description +
                "\n    " + what + "\n";
  }
};

const Exec kReference{.backend = Backend::kRef};

TEST(Fuzz, CpuEqualsTheReferenceByteForByteOnEveryInstructionSet) {
  const uint64_t cases = setting("MOXIE_FUZZ_CASES", 100'000);
  const uint64_t first = setting("MOXIE_FUZZ_FIRST", 1);
  auto backends = backends_here();
  if (backends.back().exec.backend == Backend::kCuda) backends.pop_back();
  Tally tally;
  std::vector<std::thread> workers;
  std::atomic<uint64_t> next{first};
  const unsigned num_workers = std::max(1u, std::thread::hardware_concurrency());
  for (unsigned w = 0; w < num_workers; ++w)
    workers.emplace_back([&] {
      TwoThreads threads;
      for (uint64_t number; (number = next++) < first + cases;) {
        const Case c = make_case(number);
        const auto expected = c.run(kReference);
        // Cases take the backends in turn. Every third case of a backend runs on several threads.
        const auto& backend = backends[number % backends.size()];
        Exec exec = backend.exec;
        if (number / backends.size() % 3 == 0) exec.parallel = &threads;
        tally.add(number, c, backend.name, difference(expected, c.run(exec)));
      }
    });
  for (auto& worker : workers) worker.join();
  EXPECT_EQ(tally.failed, 0u) << tally.report;
  EXPECT_EQ(tally.run, cases);
  if (cases >= 1000) {
    EXPECT_GE(tally.large * 20, tally.run) << "fewer than 5 % are large";
  }
  RecordProperty("cases", static_cast<int>(tally.run));
  RecordProperty("large", static_cast<int>(tally.large));
}

TEST(Fuzz, CudaEqualsTheReferenceByteForByte) {
  if (!has_cuda_device()) GTEST_SKIP() << "no CUDA device, or a build without CUDA";
  const uint64_t cases = setting("MOXIE_FUZZ_CASES", 100'000);
  const uint64_t first = setting("MOXIE_FUZZ_FIRST", 1);
  Tally tally;
  std::vector<std::thread> workers;
  std::atomic<uint64_t> next{first};
  // Several threads run cases at once, because the reference on the CPU takes most of the time.
  for (unsigned w = 0; w < std::max(1u, std::thread::hardware_concurrency()); ++w)
    workers.emplace_back([&] {
      for (uint64_t number; (number = next++) < first + cases;) {
        const Case c = make_case(number);
        tally.add(number, c, "cuda",
                  difference(c.run(kReference), c.run({.backend = Backend::kCuda})));
      }
    });
  for (auto& worker : workers) worker.join();
  EXPECT_EQ(tally.failed, 0u) << tally.report;
  EXPECT_EQ(tally.run, cases);
}

}  // namespace
}  // namespace moxie::testing
