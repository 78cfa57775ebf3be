// What the modules that multiply have in common: a recipe, which convert.h can give them by name,
// and statistics of what the recipe loses.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

namespace moxie::nn {

class Quantizable {
 public:
  virtual ~Quantizable() = default;
  virtual const std::string& recipe() const = 0;
  // "bf16" turns quantization off. Refuses a recipe that there is none of.
  virtual void set_recipe(const std::string& recipe) = 0;
  // With the cache on, this call and refresh() quantize the weights, and forward reads the result
  // (weight_cache.h).
  virtual void set_weight_cache(bool on) = 0;
  virtual void refresh() = 0;

  // While on, forward and backward add to stats() what quantization loses of each operand. Results
  // stay what they are, and nothing waits for the device.
  void collect_stats(bool on) { collects_ = on; }
  bool collects_stats() const { return collects_; }
  // f64 [products, 6, 5], where the module last ran: stats.h names what it holds. sqnr() reads it.
  const at::Tensor& stats() const { return stats_; }
  void reset_stats();
  // The weight that each product multiplies by.
  const std::vector<std::string>& products() const { return products_; }

 protected:
  explicit Quantizable(std::vector<std::string> products);
  // stats() where x is.
  const at::Tensor& all_stats(const at::Tensor& x);
  // What grouped_mm takes: the part of stats() for a product of x, or nothing while off.
  std::optional<at::Tensor> stats_of(int64_t product, const at::Tensor& x);

 private:
  std::vector<std::string> products_;
  at::Tensor stats_;
  bool collects_ = false;
};

}  // namespace moxie::nn
