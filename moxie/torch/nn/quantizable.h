// The base class of modules with quantized products. It holds statistics of their quantization
// errors, and lets convert.h set their recipe by the module's name.
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
  // The recipe bf16 turns quantization off. Throws if there is no such recipe.
  virtual void set_recipe(const std::string& recipe) = 0;
  // If on, this call and refresh() quantize the weights, and forward uses what they made instead of
  // quantizing again (weight_cache.h).
  virtual void set_weight_cache(bool on) = 0;
  virtual void refresh() = 0;

  // While on, forward and backward add the quantization errors of each operand to stats(). This
  // does not change results and does not wait for the device.
  void collect_stats(bool on) { collects_ = on; }
  bool collects_stats() const { return collects_; }
  // The statistics, f64 [products, 6, 5], on the device on which the module last ran. stats.h
  // defines the sums, and sqnr() turns them into dB.
  const at::Tensor& stats() const { return stats_; }
  void reset_stats();
  // The name of the weight of each product.
  const std::vector<std::string>& products() const { return products_; }

 protected:
  explicit Quantizable(std::vector<std::string> products);
  // Moves stats() to the device of x and returns it.
  const at::Tensor& all_stats(const at::Tensor& x);
  // The stats argument for this product's grouped_mm: its part of stats(), or nullopt while
  // collecting is off.
  std::optional<at::Tensor> stats_of(int64_t product, const at::Tensor& x);

 private:
  std::vector<std::string> products_;
  at::Tensor stats_;
  bool collects_ = false;
};

}  // namespace moxie::nn
