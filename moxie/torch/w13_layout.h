// How the rows of gate and up lie in w13 [G, 2F, D] and b13 [G, 2F]: all gates, then all ups, as
// products and SwiGLU take them; or one of each in turn, as some models store them.
#pragma once

#include "moxie/torch/view.h"

namespace moxie::ops {

enum class W13Layout : int64_t { kConcatenated, kInterleaved };

// Interleaved rows in the order of concatenated ones: as a view [G, 2, F, ..], and as a copy.
inline Tensor halves_of_interleaved(const Tensor& w) {
  return w.unflatten(1, {-1, 2}).transpose(1, 2);
}
inline Tensor concatenated(const Tensor& interleaved) {
  return halves_of_interleaved(interleaved).flatten(1, 2);
}
// And back.
inline Tensor interleaved(const Tensor& concatenated) {
  return concatenated.unflatten(1, {2, -1}).transpose(1, 2).flatten(1, 2);
}

}  // namespace moxie::ops
