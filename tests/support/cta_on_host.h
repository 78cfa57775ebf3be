// Runs device code on a CPU: the threads of one CTA are fibers that switch at every collective
// (shuffles, votes, barriers), so that the integer logic of kernels is tested without a GPU.
// Include it before the .cuh files under test, which must not include CUDA headers. Every thread of
// the host has a CTA of its own, so that CTAs of different GPUs can wait for each other.
//
// It also finds errors that would hang a GPU or stay hidden on it. The program ends with an error
// if lanes wait for a lane that has exited or waits at a barrier. And if a barrier is missing
// between a write to shared memory and a read, running the lanes in rising and in falling order
// gives different results.
#pragma once

#include <ucontext.h>

#include <atomic>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>

#define __device__
#define __forceinline__ inline

namespace moxie::testing {

struct IndexOnHost {
  unsigned x = 0, y = 0, z = 0;
};

enum class LaneOrder { kUp, kDown };

class CtaOnHost {
 public:
  static CtaOnHost& instance();  // of this thread of the host

  // Runs body in every thread of a CTA of `threads` threads, a multiple of a warp.
  void run(int threads, LaneOrder order, const std::function<void()>& body);

  // ---- called by the CUDA functions at the end of this file ----

  // Waits for all lanes of the warp. Returns the values that the 32 lanes passed.
  const uint64_t* exchange(uint64_t value);
  // Lets the other threads run, of all warps, for one that waits for a CTA elsewhere.
  void yield();
  // Waits for all threads that have not exited. Returns whether `value` was true in all of them.
  bool barrier(bool value);
  int lane() const { return self_ % kLanes; }

 private:
  static constexpr int kLanes = 32, kMaxThreads = 256;
  static constexpr size_t kStackBytes = 128 << 10;
  enum class State { kReady, kAtBarrier, kEnded };

  struct Fiber {
    void* resume[5];  // buffer of __builtin_setjmp; swapcontext would make a system call
    bool is_started = false;
    State state = State::kEnded;
    ucontext_t start;
    std::unique_ptr<char[]> stack;
    const void* stack_bottom = nullptr;
    size_t stack_bytes = 0;
    void* fake_stack = nullptr;  // of AddressSanitizer
  };
  struct Warp {
    uint64_t value[2][kLanes];  // two sets, in turn: a lane may be one exchange ahead of another
    unsigned generation = 0;    // number of complete exchanges
    int waiting = 0, ready = 0;
  };

  static void start();
  [[gnu::noinline]] void switch_to(int from, int to);
  [[noreturn, gnu::noinline]] static void jump(Fiber& to);
  void leave(State state);  // suspends this thread and runs another
  int next_ready(int from) const;
  [[noreturn]] static void fail(const char* what);

  static constexpr int kMain = kMaxThreads;  // the index of the fiber that run() is called in
  Fiber fibers_[kMaxThreads + 1];
  Warp warps_[kMaxThreads / kLanes];
  const std::function<void()>* body_ = nullptr;
  int threads_ = 0, self_ = kMain;
  int step_ = 1;
  bool all_true_ = true, result_ = true;
};

}  // namespace moxie::testing

// CUDA's built-in variables and functions, as code under test uses them.
inline thread_local moxie::testing::IndexOnHost threadIdx, blockIdx, blockDim, gridDim;

namespace moxie::testing {

template <class T>
uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

// Returns the value that lane `source` passed, or the caller's own if `source` is not 0 to 31.
template <class T>
T shuffle(unsigned mask, T value, int source) {
  if (mask != ~0u) std::abort();
  CtaOnHost& cta = CtaOnHost::instance();
  const uint64_t* all = cta.exchange(to_bits(value));
  return from_bits<T>(all[source < 0 || source > 31 ? cta.lane() : source]);
}

}  // namespace moxie::testing

template <class T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return moxie::testing::shuffle(mask, value, lane % 32);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta) {
  const int lane = moxie::testing::CtaOnHost::instance().lane();
  return moxie::testing::shuffle(mask, value, lane - static_cast<int>(delta));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  return moxie::testing::shuffle(mask, value, moxie::testing::CtaOnHost::instance().lane() ^ bits);
}
template <class T>
T __reduce_add_sync(unsigned mask, T value) {
  if (mask != ~0u) std::abort();
  const uint64_t* all =
      moxie::testing::CtaOnHost::instance().exchange(moxie::testing::to_bits(value));
  T sum = 0;
  for (int i = 0; i < 32; ++i) sum += moxie::testing::from_bits<T>(all[i]);
  return sum;
}
inline unsigned __ballot_sync(unsigned mask, bool value) {
  if (mask != ~0u) std::abort();
  const uint64_t* all = moxie::testing::CtaOnHost::instance().exchange(value);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= all[i] ? 1u << i : 0;
  return bits;
}
inline int __popc(unsigned bits) { return std::popcount(bits); }
inline int __ffs(int bits) { return bits ? std::countr_zero(static_cast<unsigned>(bits)) + 1 : 0; }
inline void __syncwarp() { moxie::testing::CtaOnHost::instance().exchange(0); }
inline void __syncthreads() { moxie::testing::CtaOnHost::instance().barrier(true); }
// Fibers switch at collectives only, so nothing comes between.
inline unsigned long long atomicCAS(unsigned long long* at, unsigned long long expected,
                                    unsigned long long value) {
  const unsigned long long found = *at;
  if (found == expected) *at = value;
  return found;
}
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline int __syncthreads_and(int value) {
  return moxie::testing::CtaOnHost::instance().barrier(value != 0);
}
