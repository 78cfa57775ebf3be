// Properties of a GPU.
#pragma once

namespace moxie {

// A negative device is the current one. Both return 0 if there is no GPU or no CUDA backend.
int compute_capability(int device);   // major * 10 + minor: 90 is Hopper, 100 Blackwell
int num_multiprocessors(int device);  // affects how work is divided, never a result

}  // namespace moxie
