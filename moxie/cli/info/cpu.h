// Describes the CPU of this machine.
#pragma once

#include <cstdint>
#include <string>

namespace moxie::cli {

struct Cpu {
  std::string model;
  int64_t cores = 0;            // 0 if unknown
  int64_t threads = 0;          // as std::thread::hardware_concurrency() counts them
  std::string instruction_set;  // the one that Moxie's cpu backend uses
};

Cpu find_cpu();

}  // namespace moxie::cli
