// The base of the modules with quantized products. It holds their recipe, which convert.h can set
// by the module's name, and statistics of their quantization errors.
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
  // "bf16" turns quantization off. Throws for an unknown recipe.
  virtual void set_recipe(const std::string& recipe) = 0;
  // With the cache on, this call and refresh() quantize the weights, and forward reads the result
  // (weight_cache.h).
  virtual void set_weight_cache(bool on) = 0;
  virtual void refresh() = 0;

  // While this is on, forward and backward add the quantization errors of each operand to stats().
  // The results do not change, and nothing waits for the device.
  void collect_stats(bool on) { collects_ = on; }
  bool collects_stats() const { return collects_; }
  // f64 [products, 6, 5], on the device on which the module last ran. stats.h defines the sums, and
  // sqnr() turns them into dB.
  const at::Tensor& stats() const { return stats_; }
  void reset_stats();
  // The name of the weight of each product.
  const std::vector<std::string>& products() const { return products_; }

 protected:
  explicit Quantizable(std::vector<std::string> products);
  // stats(), moved to the device of x.
  const at::Tensor& all_stats(const at::Tensor& x);
  // The stats argument of grouped_mm: the part of stats() for this product, or nullopt while off.
  std::optional<at::Tensor> stats_of(int64_t product, const at::Tensor& x);

 private:
  std::vector<std::string> products_;
  at::Tensor stats_;
  bool collects_ = false;
};

}  // namespace moxie::nn
