// The backends that run on this machine, with names for test reports.
#pragma once

#include <string>
#include <vector>

#include "moxie/core/base/exec.h"
#include "tests/support/device_memory.h"

namespace moxie::testing {

struct NamedExec {
  std::string name;
  Exec exec;
};

// Every backend except the reference: each instruction set of this CPU, and a GPU if there is one.
inline std::vector<NamedExec> backends_here() {
  std::vector<NamedExec> all;
  const char* names[] = {"cpu_baseline", "cpu_avx2", "cpu_avx512"};
  for (int isa = 0; isa <= static_cast<int>(best_isa()); ++isa)
    all.push_back({names[isa], {.backend = Backend::kCpu, .isa = static_cast<Isa>(isa)}});
  if (has_cuda_device()) all.push_back({"cuda", {.backend = Backend::kCuda}});
  return all;
}

}  // namespace moxie::testing
