// The spec as loops.
#include <algorithm>
#include <cmath>

#include "moxie/core/base/parallel.h"
#include "moxie/core/format/values.h"
#include "moxie/core/swiglu/backends.h"

namespace moxie::ref {
namespace {

float sigmoid(float z) { return 1.f / (1.f + std::exp(-z)); }

// What the activation gives for one element.
float value_of(Activation activation, float gate, float up) {
  if (activation == Activation::kSwiglu) return gate * sigmoid(gate) * up;
  const float g = gate > kClampLimit ? kClampLimit : gate;
  const float u = std::clamp(up, -kClampLimit, kClampLimit);
  return g * sigmoid(kClampAlpha * g) * (u + 1.f);
}

struct Grads {
  float gate, up;
};
Grads grads_of(Activation activation, float da, float gate, float up) {
  if (activation == Activation::kSwiglu) {
    const float s = sigmoid(gate), silu = gate * s;
    return {da * up * (s + silu * (1.f - s)), da * silu};  // d silu = s + z s (1 - s)
  }
  const float g = gate > kClampLimit ? kClampLimit : gate;
  const float u = std::clamp(up, -kClampLimit, kClampLimit);
  const float s = sigmoid(kClampAlpha * g), glu = g * s;
  return {gate > kClampLimit ? 0.f : da * (u + 1.f) * (s + kClampAlpha * glu * (1.f - s)),
          up > kClampLimit || up < -kClampLimit ? 0.f : da * glu};
}

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
      terms[f - first] = value_at(args.da, r * width + f) * value_of(args.activation, gate, up);
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
      put_value(args.a, r * width + f, weight * value_of(args.activation, gate, up));
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
      const auto [dgate, dup] = grads_of(args.activation, da, gate, up);
      put_value(args.dh, gate_at, weight * dgate);
      put_value(args.dh, up_at, weight * dup);
    }
    if (args.weights)
      args.weights->dweights.data[args.weights->of.slot_of.data[r]] = dot_of(args, r);
  }
}

}  // namespace moxie::ref
