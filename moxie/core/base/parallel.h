// How kernels of the cpu backend run on the threads of an Exec.
#pragma once

#include <cfenv>
#include <cstdint>

#include "moxie/core/base/exec.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moxie {

// Around every range of work, in whichever thread runs it (and around ref's loops):
// - The floating-point mode is the default one, so that a caller's flush-to-zero or rounding mode
//   never changes a byte; afterwards the thread has its own mode and exception flags back.
// - Streaming stores (simd/stream.inc) are complete before anyone learns that the range is done.
class KernelScope {
 public:
#if defined(__x86_64__)
  // fesetenv leaves flush-to-zero alone, hence the register itself.
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

// body(begin, end) on ranges that cover [0, count) once; the caller's thread alone without a pool.
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
