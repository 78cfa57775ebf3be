// Runs kernels of the cpu backend on the threads of an Exec.
#pragma once

#include <cfenv>
#include <cstdint>

#include "moxie/core/base/exec.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moxie {

// An object of this class lives while the cpu backend works on a range, or ref's loops run:
// - It sets the default floating-point mode, so that a caller's flush-to-zero or rounding mode
//   never changes a result, and restores the thread's mode and exception flags at the end.
// - It waits for streaming stores (simd/stream.inc) before the range counts as done.
class KernelScope {
 public:
#if defined(__x86_64__)
  // Sets MXCSR directly, because fesetenv does not change flush-to-zero.
  KernelScope() : mode_(_mm_getcsr()) { _mm_setcsr(kDefaultMode); }
  ~KernelScope() {
    _mm_sfence();
    _mm_setcsr(mode_);
  }
#else
  KernelScope() { std::feholdexcept(&mode_), std::fesetenv(FE_DFL_ENV); }
  ~KernelScope() { std::fesetenv(&mode_); }
#endif
  KernelScope(const KernelScope&) = delete;
  KernelScope& operator=(const KernelScope&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr unsigned kDefaultMode = 0x1f80;  // round to nearest even, exceptions masked
  unsigned mode_;
#else
  std::fenv_t mode_;
#endif
};

// Calls body(begin, end) on disjoint ranges that cover [0, count); if exec has no thread pool, in
// this thread.
template <class Body>
void parallel_for(const Exec& exec, int64_t count, int64_t grain, const Body& body) {
  if (count <= 0) return;
  const auto range = [&body](int64_t begin, int64_t end) {
    const KernelScope scope;
    body(begin, end);
  };
  if (exec.parallel)
    exec.parallel->run(count, grain, range);
  else
    range(0, count);
}

}  // namespace moxie
