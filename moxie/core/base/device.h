// What the GPU at hand is.
#pragma once

namespace moxie {

// major * 10 + minor of a CUDA device, of the current one if it is negative: 90 is Hopper, 100
// Blackwell; 0 without a CUDA backend.
int compute_capability(int device);

}  // namespace moxie
