// The flags of `moxie info --ep`, which prints what the exchange of expert parallelism costs.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <vector>

#include "moxie/core/cost/exchange_cost.h"

namespace moxie::cli {

enum class Output : uint8_t { kText, kJson };

struct EpFlags {
  bool ep = false, published = false;
  std::vector<int64_t> sizes = {8, 16, 32, 64, 128, 256, 512, 1024, 2048};
  ExchangeCostArgs layer;  // the tables set ranks, wire and once_per_rank
  WireFormat wire = WireFormat::kFp8;
  double nvlink_gb_per_s = 450, nic_gb_per_s = 50, tflops = 0, us_per_peer = 0;
};

// Adds to `info` the flags that need --ep. The result holds their values once the command line is
// parsed.
std::shared_ptr<EpFlags> add_ep_flags(CLI::App& command);

}  // namespace moxie::cli
