// The CPU at hand.
#pragma once

#include <cstdint>
#include <string>

namespace moxie::cli {

struct Cpu {
  std::string model;
  int64_t cores = 0;            // 0 where the system does not say
  int64_t threads = 0;          // that this process may run on
  std::string instruction_set;  // of Moxie's cpu backend
};

Cpu find_cpu();

}  // namespace moxie::cli
