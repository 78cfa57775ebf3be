// Programmatic dependent launch: a kernel may begin while the one before it in the stream runs.
#pragma once

namespace moxie::ptx {

// Lets the next kernel begin, once all CTAs of this one have called it, if that kernel's launch
// permits it (Start::kBesidePrevious in gemm_kernel.cuh).
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the kernel before this one has ended and its writes are visible.
__device__ __forceinline__ void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace moxie::ptx
