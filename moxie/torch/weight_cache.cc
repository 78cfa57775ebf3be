#include "moxie/torch/weight_cache.h"

namespace moxie {

WeightCache::WeightCache(at::Tensor w, std::string recipe)
    : w_(std::move(w)), recipe_(std::move(recipe)) {
  auto [qdata, scale, qdata_t, scale_t] = ops::quantize_weights(w_.detach(), recipe_);
  tensors_ = {qdata, scale, qdata_t, scale_t};
}

void WeightCache::refresh() {
  ops::quantize_weights_out(w_.detach(), tensors_[0], tensors_[1], tensors_[2], tensors_[3],
                            recipe_);
}

int64_t WeightCache::num_bytes() const {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors_) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

}  // namespace moxie
