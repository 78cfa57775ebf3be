#include "moxie/torch/exchange/group.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <sstream>
#include <thread>

namespace moxie::ops {
namespace {

using Clock = std::chrono::steady_clock;

// After an exchange failed, this rank waits this long for the other ranks to report through the
// store, then names those that did not. It is short enough that the error appears within a second
// of the group's timeout.
constexpr auto kPatience = std::chrono::milliseconds(600);
constexpr auto kPause = std::chrono::milliseconds(20);  // between two reads of the store

// Which ranks have reported through the store that their exchange failed too, which shows that they
// live. A detached thread fills this in, because the store may be gone or not answer.
struct RollCall {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<bool> lives;
  bool done = false, store_failed = false;
};

void call_roll(const c10::intrusive_ptr<c10d::Store>& store, const std::string& prefix,
               int64_t rank, const std::shared_ptr<RollCall>& roll, Clock::time_point end) {
  const auto key_of = [&](size_t of) { return prefix + std::to_string(of); };
  try {
    store->set(key_of(static_cast<size_t>(rank)), std::vector<uint8_t>{1});
    bool all = false;
    while (!all && Clock::now() < end) {
      all = true;
      for (size_t i = 0; i < roll->lives.size(); ++i) {
        bool known = false;
        {
          const std::lock_guard lock(roll->mutex);
          known = roll->lives[i];
        }
        if (known) continue;
        const bool there = store->check({key_of(i)});
        const std::lock_guard lock(roll->mutex);
        roll->lives[i] = there;
        all = all && there;
      }
      if (!all) std::this_thread::sleep_for(kPause);
    }
  } catch (const std::exception&) {
    const std::lock_guard lock(roll->mutex);
    roll->store_failed = true;
  }
  const std::lock_guard lock(roll->mutex);
  roll->done = true;
  roll->changed.notify_all();
}

// The ranks that did not report, as "rank 2" or "ranks 2, 3"; empty if all did.
std::string silent_ranks(const c10::intrusive_ptr<c10d::Store>& store, const std::string& prefix,
                         int64_t rank, int64_t size) {
  const auto roll = std::make_shared<RollCall>();
  roll->lives.resize(static_cast<size_t>(size), false);
  const auto end = Clock::now() + kPatience;
  std::thread(call_roll, store, prefix, rank, roll, end).detach();
  std::unique_lock lock(roll->mutex);
  roll->changed.wait_until(lock, end + kPause, [&] { return roll->done; });
  if (roll->store_failed) return "the store (of rank 0, as a rule)";
  std::ostringstream ranks;
  int64_t count = 0;
  for (int64_t i = 0; i < size; ++i)
    if (i != rank && !roll->lives[static_cast<size_t>(i)]) ranks << (count++ ? ", " : "") << i;
  return count == 0 ? "" : (count == 1 ? "rank " : "ranks ") + ranks.str();
}

at::Tensor call_boxed(const char* op, std::vector<c10::IValue> stack) {
  c10::Dispatcher::singleton().findSchemaOrThrow(op, "").callBoxed(&stack);
  return stack.at(0).toTensor();
}

}  // namespace

Group::Group(const std::string& name, const char* op)
    : name_(name), op_(op), group_([&] {
        try {
          return c10d::resolve_process_group(name);
        } catch (const c10::Error&) {
          TORCH_CHECK_VALUE(false, op, ": there is no process group '", name, "' in this process");
        }
      }()) {}

template <class Body>
at::Tensor Group::named_failure(const char* what, Body&& body) const {
  try {
    return body();
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, failure(what, error.what_without_backtrace()));
  } catch (const std::exception& error) {
    TORCH_CHECK(false, failure(what, error.what()));
  }
}

// Calls torch's collectives through their schemas (boxed), because their C++ types change between
// versions of torch.
at::Tensor Group::all_to_all(const at::Tensor& send, const Sizes& sizes, const char* what) const {
  return named_failure(what, [&] {
    return call_boxed("_c10d_functional::wait_tensor",
                      {call_boxed("_c10d_functional::all_to_all_single",
                                  {send, sizes.receive, sizes.send, name_})});
  });
}

at::Tensor Group::all_reduce(const at::Tensor& x, const char* what) const {
  return named_failure(what, [&] {
    return call_boxed("_c10d_functional::wait_tensor",
                      {call_boxed("_c10d_functional::all_reduce", {x, "sum", name_})});
  });
}

std::string Group::failure(const char* what, const char* why) const {
  std::string silent;
  if (const auto store = group_->getStore())
    silent = silent_ranks(store, "moxie/failed/" + name_ + "/", rank(), size());
  std::ostringstream text;
  text << op_ << ": the exchange of " << what << " failed on rank " << rank() << " of the "
       << size() << " ranks of group '" << name_ << "'";
  if (!silent.empty()) text << "; no word from " << silent << ": dead, stalled or elsewhere";
  text << " (" << why << ")";
  return text.str();
}

}  // namespace moxie::ops
