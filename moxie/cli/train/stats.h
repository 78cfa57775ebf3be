// What a step says about itself beyond its loss: the load of the experts, and what quantization
// loses of every operand of every product.
#pragma once

#include <string>
#include <vector>

#include "moxie/cli/train/metrics.h"
#include "moxie/cli/train/model.h"

namespace moxie::cli {

// While it lives the model's modules collect.
class Stats {
 public:
  explicit Stats(LanguageModelImpl& model);
  Stats(const Stats&) = delete;
  Stats& operator=(const Stats&) = delete;
  ~Stats();

  // The rows of each expert in this step; before update_routers(), which starts to count again.
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
  std::vector<Module> modules_;  // that have a recipe which quantizes
  std::vector<Load> loads_;
};

}  // namespace moxie::cli
