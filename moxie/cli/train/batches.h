// Batches of windows of the corpus, as tensors on the model's device.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "moxie/cli/train/config.h"
#include "moxie/cli/train/data.h"

namespace moxie::cli {

// All batches are int64 [B, S + 1].
class Batches {
 public:
  // The corpus must outlive this object.
  Batches(const Config& config, const Corpus& corpus, c10::Device device);

  at::Tensor to_train(int64_t window) const;  // the batch that starts at this window
  // The batch that starts at `first`, or the rest, of `count` windows spread over the held-out
  // text.
  at::Tensor held_out(int64_t first, int64_t count) const;

 private:
  at::Tensor read(int64_t count, const std::function<void(int64_t index, uint8_t* to)>& read) const;
  const Corpus& corpus_;
  int64_t batch_, length_;
  c10::Device device_;
};

}  // namespace moxie::cli
