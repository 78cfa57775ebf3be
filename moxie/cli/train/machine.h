// Devices, memory and signals of the machine.
#pragma once

#include <c10/core/Device.h>

#include <string>

namespace moxie::cli {

// Chooses the device by name: "auto", "cpu" or "cuda". Throws Error for "cuda" if Moxie cannot use
// a GPU.
c10::Device choose_device(const std::string& name);

std::string describe(c10::Device device);

// The peak of memory so far: of the process on a CPU, of torch's allocations on a GPU.
int64_t peak_memory_bytes(c10::Device device);

// While it lives, records signals that ask the program to end: SIGINT, SIGTERM and SIGHUP (the
// terminal was closed; ignored under nohup), each of which ends the program if it comes a second
// time, and SIGPIPE (nobody reads the progress any more).
class InterruptSignals {
 public:
  InterruptSignals();
  ~InterruptSignals();
  InterruptSignals(const InterruptSignals&) = delete;
  InterruptSignals& operator=(const InterruptSignals&) = delete;
};

// Whether InterruptSignals has recorded a signal.
bool interrupted();

}  // namespace moxie::cli
