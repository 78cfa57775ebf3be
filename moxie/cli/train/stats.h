// Statistics of one training step: the load of the experts, and what quantization loses of every
// operand of every product.
#pragma once

#include <string>
#include <vector>

#include "moxie/cli/train/metrics.h"
#include "moxie/cli/train/model.h"

namespace moxie::cli {

// While it lives, the model's modules collect statistics.
class Stats {
 public:
  explicit Stats(LanguageModelImpl& model);
  Stats(const Stats&) = delete;
  Stats& operator=(const Stats&) = delete;
  ~Stats();

  // Records how many rows each expert got in this step. Call it before update_routers(), which
  // resets the counts.
  void count_load();
  // Copies the statistics from the device and writes them as lines of the metrics.
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
  std::vector<Module> modules_;  // modules whose recipe quantizes
  std::vector<Load> loads_;
};

}  // namespace moxie::cli
