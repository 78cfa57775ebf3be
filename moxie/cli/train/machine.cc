#include "moxie/cli/train/machine.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/resource.h>

#include <csignal>

#include "moxie/core/base/check.h"
#include "moxie/core/base/device.h"

namespace moxie::cli {
namespace {

volatile std::sig_atomic_t signal_seen = 0;

void note_signal(int) { signal_seen = 1; }

bool has_gpu() { return at::globalContext().hasCUDA() && compute_capability(0) > 0; }

}  // namespace

c10::Device choose_device(const std::string& name) {
  MOXIE_CHECK(name != "cuda" || has_gpu(), "--device cuda: ",
              at::globalContext().hasCUDA()
                  ? "this build of Moxie has no CUDA kernels (PRESET=cuda builds them)"
                  : "torch finds no GPU here");
  return name == "cpu" || !has_gpu() ? c10::Device(c10::kCPU) : c10::Device(c10::kCUDA, 0);
}

std::string describe(c10::Device device) {
  if (device.is_cpu()) return "cpu, " + std::to_string(at::get_num_threads()) + " threads";
  const int capability = compute_capability(device.index());
  return "cuda, compute capability " + std::to_string(capability / 10) + "." +
         std::to_string(capability % 10);
}

int64_t peak_memory_bytes(c10::Device device) {
  if (device.is_cpu()) {
    rusage usage = {};
    ::getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss * 1024;
  }
  using c10::CachingAllocator::StatType;
  const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  return stats.allocated_bytes[static_cast<size_t>(StatType::AGGREGATE)].peak;
}

InterruptSignals::InterruptSignals() {
  signal_seen = 0;
  struct sigaction action = {}, before = {};
  action.sa_handler = note_signal;
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGPIPE, &action, nullptr);  // not SA_RESETHAND: SIGPIPE comes with every line
  action.sa_flags |= static_cast<int>(SA_RESETHAND);
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
  ::sigaction(SIGHUP, &action, &before);
  if (before.sa_handler == SIG_IGN) std::signal(SIGHUP, SIG_IGN);  // nohup
}

// SIGPIPE stays ignored, so that a last message that nobody reads does not change the exit code.
InterruptSignals::~InterruptSignals() {
  std::signal(SIGPIPE, SIG_IGN);
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction now = {};
    ::sigaction(number, nullptr, &now);
    if (now.sa_handler != SIG_IGN) std::signal(number, SIG_DFL);
  }
}

bool interrupted() { return signal_seen != 0; }

}  // namespace moxie::cli
