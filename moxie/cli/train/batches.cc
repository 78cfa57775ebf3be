#include "moxie/cli/train/batches.h"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace moxie::cli {

Batches::Batches(const Config& config, const Corpus& corpus, c10::Device device)
    : corpus_(corpus), batch_(config.batch), length_(config.seq_len + 1), device_(device) {}

at::Tensor Batches::read(int64_t count,
                         const std::function<void(int64_t index, uint8_t* to)>& read) const {
  at::Tensor bytes = at::empty({count, length_}, at::kByte);
  for (int64_t i = 0; i < count; ++i) read(i, bytes.mutable_data_ptr<uint8_t>() + i * length_);
  return bytes.to(device_).to(at::kLong);
}

at::Tensor Batches::to_train(int64_t window) const {
  return read(batch_, [&](int64_t i, uint8_t* to) { corpus_.read(window + i, to); });
}

at::Tensor Batches::held_out(int64_t first, int64_t count) const {
  return read(std::min(batch_, count - first),
              [&](int64_t i, uint8_t* to) { corpus_.read_held_out(first + i, count, to); });
}

}  // namespace moxie::cli
