// Lists the GPUs that NVIDIA's driver reports. It needs no CUDA headers or libraries, so that a
// build without CUDA can still name a GPU that it does not use.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace moxie::cli {

struct Gpu {
  std::string name;
  int capability = 0;  // major * 10 + minor
  int64_t memory_bytes = 0;
};

// The GPUs in CUDA's order; none without a driver.
std::vector<Gpu> find_gpus();

// Whether kernels for these architectures, as CMake writes them ("90a-real 100a-real"), run on a
// GPU of this capability.
bool runs_on(std::string_view archs, int capability);

}  // namespace moxie::cli
