// What a run needs of the machine: a device, its memory, signals.
#pragma once

#include <c10/core/Device.h>

#include <string>

namespace moxie::cli {

// "auto", "cpu" or "cuda"; Error where Moxie cannot use a GPU and is told to.
c10::Device choose_device(const std::string& name);

std::string describe(c10::Device device);

// The most that was in use so far: of the process, or of torch on a GPU.
int64_t peak_memory_bytes(c10::Device device);

// While it lives, what asks the program to end is noted: SIGINT, SIGTERM, SIGHUP (a terminal that
// is closed; not under nohup), each of which ends the program when it comes again, and SIGPIPE
// (nobody reads the progress any more).
class InterruptSignals {
 public:
  InterruptSignals();
  ~InterruptSignals();
  InterruptSignals(const InterruptSignals&) = delete;
  InterruptSignals& operator=(const InterruptSignals&) = delete;
};

// Whether one was noted.
bool interrupted();

}  // namespace moxie::cli
