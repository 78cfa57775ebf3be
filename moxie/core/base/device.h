// What the GPU at hand is.
#pragma once

namespace moxie {

// major * 10 + minor of a CUDA device: 90 is Hopper, 100 Blackwell; 0 without a CUDA backend. A
// negative device is the current one; 0 if there is none.
int compute_capability(int device);

}  // namespace moxie
