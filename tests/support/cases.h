// Random problems for every op. A case depends only on its number, so that a failure can be
// reproduced anywhere.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "moxie/core/base/exec.h"

namespace moxie::testing {

struct Case {
  std::string description;  // op, shape, groups, rule, blocks: printed if the case fails
  int64_t elements = 0;     // of the largest input
  // Runs the op on poisoned outputs and returns the bytes of every output.
  std::function<std::vector<std::vector<uint8_t>>(const Exec& exec)> run;
};

Case make_case(uint64_t number);

}  // namespace moxie::testing
