// The spec as loops.
#include <algorithm>
#include <cmath>

#include "moxie/core/base/parallel.h"
#include "moxie/core/format/values.h"
#include "moxie/core/swiglu/backends.h"

namespace moxie::ref {
namespace {

float sigmoid(float z) { return 1.f / (1.f + std::exp(-z)); }

float weight_of(const RowWeights& of, int64_t r) { return of.weights.data[of.slot_of.data[r]]; }

// The gradient of the weight of row r.
float dot_of(const SwigluBackwardArgs& args, int64_t r) {
  const int64_t width = args.da.dim(1);
  float sum = 0;
  for (int64_t first = 0; first < width; first += kDotTile) {
    float terms[kDotTile] = {};
    for (int64_t f = first; f < std::min(width, first + kDotTile); ++f) {
      const float gate = value_at(args.h, r * 2 * width + f),
                  up = value_at(args.h, (r * 2 + 1) * width + f);
      terms[f - first] = value_at(args.da, r * width + f) * (gate * sigmoid(gate) * up);
    }
    sum += sum_dot_tile(terms);
  }
  return sum;
}

}  // namespace

void swiglu(const SwigluArgs& args) {
  const KernelScope scope;
  const int64_t width = args.a.dim(1);
  for (int64_t r = 0; r < args.a.dim(0); ++r) {
    const float weight = args.weights ? weight_of(*args.weights, r) : 1.f;
    for (int64_t f = 0; f < width; ++f) {
      const float gate = value_at(args.h, r * 2 * width + f),
                  up = value_at(args.h, (r * 2 + 1) * width + f);
      put_value(args.a, r * width + f, weight * (gate * sigmoid(gate) * up));
    }
  }
}

void swiglu_backward(const SwigluBackwardArgs& args) {
  const KernelScope scope;
  const int64_t width = args.da.dim(1);
  for (int64_t r = 0; r < args.da.dim(0); ++r) {
    const float weight = args.weights ? weight_of(args.weights->of, r) : 1.f;
    for (int64_t f = 0; f < width; ++f) {
      const int64_t gate_at = r * 2 * width + f, up_at = gate_at + width;
      const float gate = value_at(args.h, gate_at), up = value_at(args.h, up_at);
      const float da = value_at(args.da, r * width + f);
      const float s = sigmoid(gate), silu = gate * s;
      // d silu = s + z s (1 - s)
      put_value(args.dh, gate_at, weight * (da * up * (s + silu * (1.f - s))));
      put_value(args.dh, up_at, weight * (da * silu));
    }
    if (args.weights)
      args.weights->dweights.data[args.weights->of.slot_of.data[r]] = dot_of(args, r);
  }
}

}  // namespace moxie::ref
