// The machine: devices, memory, signals.
#pragma once

#include <c10/core/Device.h>

#include <string>

namespace moxie::cli {

// name: "auto", "cpu" or "cuda". Throws Error if "cuda" is given and Moxie cannot use a GPU.
c10::Device choose_device(const std::string& name);

std::string describe(c10::Device device);

// Peak memory so far: of the process, or of torch on a GPU.
int64_t peak_memory_bytes(c10::Device device);

// RAII: records signals that ask the program to end: SIGINT, SIGTERM, SIGHUP (closed terminal; not
// under nohup), each of which ends the program when it arrives again, and SIGPIPE (the progress has
// no reader any more).
class InterruptSignals {
 public:
  InterruptSignals();
  ~InterruptSignals();
  InterruptSignals(const InterruptSignals&) = delete;
  InterruptSignals& operator=(const InterruptSignals&) = delete;
};

// Whether a signal was recorded.
bool interrupted();

}  // namespace moxie::cli
