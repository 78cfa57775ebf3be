// Statistics of a step: the load of the experts, and the quantization error of every operand of
// every GEMM.
#pragma once

#include <string>
#include <vector>

#include "moxie/cli/train/metrics.h"
#include "moxie/cli/train/model.h"

namespace moxie::cli {

// RAII: makes the model's modules collect statistics.
class Stats {
 public:
  explicit Stats(LanguageModelImpl& model);
  Stats(const Stats&) = delete;
  Stats& operator=(const Stats&) = delete;
  ~Stats();

  // Records the rows of each expert in this step. Call before update_routers(), which resets
  // counts.
  void count_load();
  // Reads everything from the device.
  void write(int64_t step, Metrics& metrics) const;

 private:
  struct Module {
    std::string name;
    nn::Quantizable* quantizable;
  };
  struct Load {
    std::string name;
    at::Tensor counts;  // int64 [E]
  };
  LanguageModelImpl& model_;
  std::vector<Module> modules_;  // those whose recipe quantizes
  std::vector<Load> loads_;
};

}  // namespace moxie::cli
