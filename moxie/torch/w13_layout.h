// How the rows of gate and up lie in w13 [G, 2F, D] and b13 [G, 2F]: concatenated, all gates and
// then all ups, as the products and SwiGLU take them; or interleaved, one of each in turn, as some
// models store them.
#pragma once

#include "moxie/torch/view.h"

namespace moxie::ops {

enum class W13Layout : int64_t { kConcatenated, kInterleaved };

// Put interleaved rows into concatenated order: halves_of_interleaved() as a view [G, 2, F, ..],
// concatenated() as a copy [G, 2F, ..].
inline Tensor halves_of_interleaved(const Tensor& w) {
  return w.unflatten(1, {-1, 2}).transpose(1, 2);
}
inline Tensor concatenated(const Tensor& interleaved) {
  return halves_of_interleaved(interleaved).flatten(1, 2);
}
// Puts concatenated rows into interleaved order, as a copy.
inline Tensor interleaved(const Tensor& concatenated) {
  return concatenated.unflatten(1, {2, -1}).transpose(1, 2).flatten(1, 2);
}

}  // namespace moxie::ops
