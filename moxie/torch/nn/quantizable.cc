#include "moxie/torch/nn/quantizable.h"

#include <ATen/ops/zeros.h>

#include "moxie/torch/stats.h"

namespace moxie::nn {

Quantizable::Quantizable(std::vector<std::string> products) : products_(std::move(products)) {
  const auto count = static_cast<int64_t>(products_.size());
  stats_ = at::zeros({count, kNumStatsParts, kNumStats}, at::kDouble);
}

void Quantizable::reset_stats() { stats_.zero_(); }

const at::Tensor& Quantizable::all_stats(const at::Tensor& x) {
  // stats_ is not a buffer: a buffer would be in the state dict, and model.to(bf16) would round it.
  if (stats_.device() != x.device()) stats_ = stats_.to(x.device());
  return stats_;
}

std::optional<at::Tensor> Quantizable::stats_of(int64_t product, const at::Tensor& x) {
  if (!collects_) return std::nullopt;
  return all_stats(x).select(0, product);
}

}  // namespace moxie::nn
