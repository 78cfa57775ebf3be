// What a run needs of the machine: a device, its memory, signals, a lock.
#pragma once

#include <c10/core/Device.h>

#include <string>

namespace moxie::cli {

// "auto", "cpu" or "cuda"; Error where Moxie cannot use a GPU and is told to.
c10::Device choose_device(const std::string& name);

std::string describe(c10::Device device);

// The most that was in use so far: of the process, or of torch on a GPU.
int64_t peak_memory_bytes(c10::Device device);

// While it lives, the first SIGINT or SIGTERM is noted; a second one ends the program.
class InterruptSignals {
 public:
  InterruptSignals();
  ~InterruptSignals();
  InterruptSignals(const InterruptSignals&) = delete;
  InterruptSignals& operator=(const InterruptSignals&) = delete;
  bool seen() const;
};

// Error where another process has it. A killed process gives it back.
class FolderLock {
 public:
  explicit FolderLock(const std::string& path);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  int fd_;
};

}  // namespace moxie::cli
