#include "tests/support/cta_on_host.h"

#include <cstdio>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace moxie::testing {

CtaOnHost& CtaOnHost::instance() {
  static thread_local CtaOnHost cta;
  return cta;
}

void CtaOnHost::fail(const char* what) {
  std::fprintf(stderr, "CtaOnHost: %s\n", what);
  std::abort();
}

void CtaOnHost::jump(Fiber& to) {
  if (to.is_started) __builtin_longjmp(to.resume, 1);
  to.is_started = true;
  setcontext(&to.start);
  std::abort();
}

void CtaOnHost::switch_to(int from, int to) {
  if (from == to) return;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&fibers_[from].fake_stack, fibers_[to].stack_bottom,
                                 fibers_[to].stack_bytes);
#endif
  self_ = to;
  if (!__builtin_setjmp(fibers_[from].resume)) jump(fibers_[to]);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(instance().fibers_[instance().self_].fake_stack, nullptr,
                                  nullptr);
#endif
  threadIdx.x = static_cast<unsigned>(instance().self_);
}

void CtaOnHost::start() {
  CtaOnHost& cta = instance();
#if defined(__SANITIZE_ADDRESS__)
  Fiber& main = cta.fibers_[kMain];
  const void** bottom = main.stack_bottom ? nullptr : &main.stack_bottom;
  __sanitizer_finish_switch_fiber(nullptr, bottom, bottom ? &main.stack_bytes : nullptr);
#endif
  threadIdx.x = static_cast<unsigned>(cta.self_);
  for (;;) {  // the fiber of a thread runs the body of every later run() too
    (*cta.body_)();
    cta.leave(State::kEnded);
  }
}

// The next thread of the warp of `from` that is ready to run, possibly `from` itself; kMain if none
// is.
int CtaOnHost::next_ready(int from) const {
  const int warp = from / kLanes * kLanes;
  for (int i = 1; i <= kLanes; ++i) {
    const int thread = warp + (from + i * step_ + kLanes * kLanes) % kLanes;
    if (fibers_[thread].state == State::kReady) return thread;
  }
  return kMain;
}

void CtaOnHost::leave(State state) {
  Warp& warp = warps_[self_ / kLanes];
  fibers_[self_].state = state;
  --warp.ready;
  if (warp.waiting > 0 && warp.waiting == warp.ready)
    fail("a lane ended, or is at a barrier, while others of its warp wait for it");
  switch_to(self_, next_ready(self_));
}

const uint64_t* CtaOnHost::exchange(uint64_t value) {
  Warp& warp = warps_[self_ / kLanes];
  const unsigned generation = warp.generation;
  warp.value[generation % 2][self_ % kLanes] = value;
  if (++warp.waiting == kLanes) {
    warp.waiting = 0;
    ++warp.generation;
  } else {
    if (warp.waiting == warp.ready) fail("lanes wait for one of their warp that has ended");
    while (warp.generation == generation) switch_to(self_, next_ready(self_));
  }
  return warp.value[generation % 2];
}

void CtaOnHost::yield() {
  for (int i = 1; i < threads_; ++i) {
    const int thread = (self_ + i * step_ + threads_) % threads_;
    if (fibers_[thread].state == State::kReady) return switch_to(self_, thread);
  }
}

bool CtaOnHost::barrier(bool value) {
  all_true_ = all_true_ && value;
  leave(State::kAtBarrier);
  return result_;
}

void CtaOnHost::run(int threads, LaneOrder order, const std::function<void()>& body) {
  if (threads % kLanes || threads > kMaxThreads) fail("a CTA has 1 to 8 whole warps here");
  body_ = &body, threads_ = threads;
  step_ = order == LaneOrder::kUp ? 1 : -1;
  blockDim = {static_cast<unsigned>(threads), 1, 1};
  fibers_[kMain].is_started = true;
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = fibers_[i];
    fiber.state = State::kReady;
    if (fiber.stack) continue;
    fiber.stack.reset(new char[kStackBytes]);
    fiber.stack_bottom = fiber.stack.get(), fiber.stack_bytes = kStackBytes;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = kStackBytes;
    makecontext(&fiber.start, &CtaOnHost::start, 0);
  }
  const int warps = threads / kLanes;
  for (int w = 0; w < warps; ++w) warps_[w].ready = kLanes, warps_[w].waiting = 0;
  for (bool is_done = false; !is_done;) {
    for (int i = 0; i < warps; ++i) {
      const int w = step_ > 0 ? i : warps - 1 - i, last = w * kLanes + (step_ > 0 ? kLanes - 1 : 0);
      while (warps_[w].ready > 0) switch_to(kMain, next_ready(last));
    }
    // Now every thread has ended or waits at the barrier: those that wait may go on.
    result_ = all_true_, all_true_ = true, is_done = true;
    for (int i = 0; i < threads; ++i)
      if (fibers_[i].state == State::kAtBarrier) {
        fibers_[i].state = State::kReady;
        ++warps_[i / kLanes].ready;
        is_done = false;
      }
  }
}

}  // namespace moxie::testing
