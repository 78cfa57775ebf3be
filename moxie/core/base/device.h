// What the GPU at hand is.
#pragma once

namespace moxie {

// A negative device is the current one. 0 if there is none, and without a CUDA backend.
int compute_capability(int device);   // major * 10 + minor: 90 is Hopper, 100 Blackwell
int num_multiprocessors(int device);  // decides how work is cut, never its result

}  // namespace moxie
