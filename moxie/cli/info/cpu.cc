#include "moxie/cli/info/cpu.h"

#include <fstream>
#include <set>
#include <thread>
#include <utility>

#include "moxie/core/base/exec.h"

namespace moxie::cli {
namespace {

std::string name_of(Isa isa) {
  switch (isa) {
    case Isa::kAvx512: return "avx512";
    case Isa::kAvx2: return "avx2";
    case Isa::kBaseline: break;
  }
  return "baseline";
}

}  // namespace

Cpu find_cpu() {
  Cpu cpu{.model = "unknown",
          .threads = std::thread::hardware_concurrency(),
          .instruction_set = name_of(best_isa())};
  std::set<std::pair<std::string, std::string>> cores;  // (socket, number of the core in it)
  std::string socket, line;
  for (std::ifstream file("/proc/cpuinfo"); std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (colon == line.npos) continue;
    const std::string key = line.substr(0, line.find('\t')), value = line.substr(colon + 2);
    if (key == "model name") cpu.model = value;
    if (key == "physical id") socket = value;
    if (key == "core id") cores.emplace(socket, value);
  }
  cpu.cores = static_cast<int64_t>(cores.size());
  return cpu;
}

}  // namespace moxie::cli
