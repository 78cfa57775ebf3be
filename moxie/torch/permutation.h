// How tokens [T, D] become rows [R, D]: what route says. Absent: they are rows already.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace moxie::ops {

struct Permutation {
  std::optional<at::Tensor> slot_of = std::nullopt, row_of = std::nullopt;
  int64_t top_k = 1;
};

}  // namespace moxie::ops
