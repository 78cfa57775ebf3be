// Batches of windows of the corpus, as tensors on the model's device.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "moxie/cli/train/config.h"
#include "moxie/cli/train/data.h"

namespace moxie::cli {

// All batches are int64 [B, S + 1]: B windows, each of S tokens and the token after them.
class Batches {
 public:
  // The corpus must outlive this object.
  Batches(const Config& config, const Corpus& corpus, c10::Device device);

  at::Tensor to_train(int64_t window) const;  // the batch that starts at this window
  // A batch of the `count` windows that are spread over the held-out text: it starts at window
  // `first`, and is shorter if fewer are left.
  at::Tensor held_out(int64_t first, int64_t count) const;

 private:
  at::Tensor read(int64_t count, const std::function<void(int64_t index, uint8_t* to)>& read) const;
  const Corpus& corpus_;
  int64_t batch_, length_;
  c10::Device device_;
};

}  // namespace moxie::cli
