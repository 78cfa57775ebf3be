// Caches the quantized forms of w for one optimizer step: the four tensors that grouped_mm takes as
// quantized_w. Nothing refreshes the cache by itself (docs/RECIPES.md says why): call refresh()
// after each change of w.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "moxie/torch/ops.h"

namespace moxie {

// How a parameter stores the weights that products take as [G, N, K].
struct Stored {
  bool transposed = false;   // [G, K, N]
  bool interleaved = false;  // rows of gate and up alternate (expert_mlp's w13_layout)

  at::Tensor as_taken(const at::Tensor& w) const;
};

class WeightCache {
 public:
  explicit WeightCache(at::Tensor w, std::string recipe = "mxfp8_rceil_128", Stored stored = {});

  void refresh();
  at::ArrayRef<at::Tensor> tensors() const { return tensors_; }
  int64_t num_bytes() const;

 private:
  at::Tensor w_;
  std::string recipe_;
  Stored stored_;
  std::array<at::Tensor, 4> tensors_;  // qdata, scale, qdata_t, scale_t
};

// Steps an optimizer, then refreshes all these caches. torch's C++ optimizers have no hooks that
// could do it.
//
//   moxie::step(optimizer, caches);
template <class Optimizer>
void step(Optimizer& optimizer, std::vector<WeightCache>& caches) {
  optimizer.step();
  for (WeightCache& cache : caches) cache.refresh();
}

}  // namespace moxie
