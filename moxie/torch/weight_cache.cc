#include "moxie/torch/weight_cache.h"

#include "moxie/torch/w13_layout.h"

namespace moxie {

at::Tensor Stored::as_taken(const at::Tensor& w) const {
  const at::Tensor rows = transposed ? w.mT() : w;
  return interleaved ? ops::concatenated(rows) : rows;
}

WeightCache::WeightCache(at::Tensor w, std::string recipe, Stored stored)
    : w_(std::move(w)), recipe_(std::move(recipe)), stored_(stored) {
  auto [qdata, scale, qdata_t, scale_t] =
      ops::quantize_weights(stored_.as_taken(w_.detach()), recipe_);
  tensors_ = {qdata, scale, qdata_t, scale_t};
}

void WeightCache::refresh() {
  ops::quantize_weights_out(stored_.as_taken(w_.detach()), tensors_[0], tensors_[1], tensors_[2],
                            tensors_[3], recipe_);
}

int64_t WeightCache::num_bytes() const {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors_) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

}  // namespace moxie
