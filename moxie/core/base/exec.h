// Where and how an op runs. Chosen by the caller, never by the environment.
#pragma once

#include <cstdint>
#include <functional>

namespace moxie {

enum class Backend : uint8_t {
  kRef,   // the spec as loops; the other backends are tested against it
  kCpu,   // SIMD and threads
  kCuda,  // NVIDIA GPUs; pointers are device pointers
};

// The instruction sets the cpu backend is compiled for, weakest first.
enum class Isa : uint8_t { kBaseline, kAvx2, kAvx512 };

Isa best_isa();  // the strongest that this machine supports

// How the cpu backend distributes work over threads. moxie/torch passes torch's own pool; other
// programs may pass their own.
class Parallel {
 public:
  using Body = std::function<void(int64_t begin, int64_t end)>;
  virtual ~Parallel() = default;
  // Calls body on disjoint ranges that cover [0, count); only the last may be shorter than grain.
  virtual void run(int64_t count, int64_t grain, const Body& body) = 0;
};

struct Exec {
  Backend backend = Backend::kCpu;
  Isa isa = best_isa();          // cpu
  Parallel* parallel = nullptr;  // cpu; nullptr: only the calling thread works
  void* stream = nullptr;        // cuda: a cudaStream_t, nullptr is the default stream
};

#ifdef MOXIE_CUDA
inline constexpr bool kHasCuda = true;
#else
inline constexpr bool kHasCuda = false;
#endif

}  // namespace moxie
