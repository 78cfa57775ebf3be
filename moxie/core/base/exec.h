// Where and how an op runs. Chosen by the caller, never by the environment.
#pragma once

#include <cstdint>
#include <functional>

namespace moxie {

enum class Backend : uint8_t {
  kRef,   // the spec as loops: what every other backend is compared with
  kCpu,   // SIMD and threads
  kCuda,  // NVIDIA GPUs; pointers are device pointers
};

// The instruction sets the cpu backend is compiled for, weakest first.
enum class Isa : uint8_t { kBaseline, kAvx2, kAvx512 };

Isa best_isa();  // the strongest one that this machine runs

// How the cpu backend spreads work over threads. moxie/torch passes torch's own pool; other
// programs pass theirs, or nothing.
class Parallel {
 public:
  using Body = std::function<void(int64_t begin, int64_t end)>;
  virtual ~Parallel() = default;
  // Calls body on ranges that cover [0, count) once, none shorter than grain but the last.
  virtual void run(int64_t count, int64_t grain, const Body& body) = 0;
};

struct Exec {
  Backend backend = Backend::kCpu;
  Isa isa = best_isa();          // cpu
  Parallel* parallel = nullptr;  // cpu; nullptr: the calling thread does it all
  void* stream = nullptr;        // cuda: a cudaStream_t, nullptr is the default stream
};

#ifdef MOXIE_CUDA
inline constexpr bool kHasCuda = true;
#else
inline constexpr bool kHasCuda = false;
#endif

}  // namespace moxie
