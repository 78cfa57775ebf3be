// The spec as loops.
#include <cmath>

#include "moxie/core/base/parallel.h"
#include "moxie/core/format/values.h"
#include "moxie/core/swiglu/backends.h"

namespace moxie::ref {
namespace {

float sigmoid(float z) { return 1.f / (1.f + std::exp(-z)); }

}  // namespace

void swiglu(const SwigluArgs& args) {
  const KernelScope scope;
  const int64_t width = args.a.dim(1);
  for (int64_t r = 0; r < args.a.dim(0); ++r)
    for (int64_t f = 0; f < width; ++f) {
      const float gate = value_at(args.h, r * 2 * width + f),
                  up = value_at(args.h, (r * 2 + 1) * width + f);
      put_value(args.a, r * width + f, gate * sigmoid(gate) * up);
    }
}

void swiglu_backward(const SwigluBackwardArgs& args) {
  const KernelScope scope;
  const int64_t width = args.da.dim(1);
  for (int64_t r = 0; r < args.da.dim(0); ++r)
    for (int64_t f = 0; f < width; ++f) {
      const int64_t gate_at = r * 2 * width + f, up_at = gate_at + width;
      const float gate = value_at(args.h, gate_at), up = value_at(args.h, up_at);
      const float da = value_at(args.da, r * width + f);
      const float s = sigmoid(gate), silu = gate * s;
      put_value(args.dh, gate_at, da * up * (s + silu * (1.f - s)));  // d silu = s + z s (1 - s)
      put_value(args.dh, up_at, da * silu);
    }
}

}  // namespace moxie::ref
