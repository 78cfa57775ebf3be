// The CPU of this machine.
#pragma once

#include <cstdint>
#include <string>

namespace moxie::cli {

struct Cpu {
  std::string model;
  int64_t cores = 0;            // 0 if unknown
  int64_t threads = 0;          // hardware threads that this process may use
  std::string instruction_set;  // of Moxie's cpu backend
};

Cpu find_cpu();

}  // namespace moxie::cli
