// The activations that the swiglu ops compute from gate and up. NUMERICS.md, section 8, has the
// order of roundings.
//
//   swiglu           a = silu(gate) * up
//   clamped_swiglu   g = min(gate, 7), u = up within [-7, 7]
//                    a = g * sigmoid(1.702 g) * (u + 1)
#pragma once

#include <cstdint>

#include "moxie/core/base/view.h"
#include "moxie/core/format/bf16.h"

namespace moxie {

enum class Activation : int64_t { kSwiglu, kClampedSwiglu };

// The constants of gpt-oss. 1.702 makes g * sigmoid(1.702 g) close to GELU; values beyond the limit
// are cut off, and their gradients are 0.
inline constexpr float kClampAlpha = 1.702f, kClampLimit = 7.f;

constexpr const char* name(Activation activation) {
  switch (activation) {
    case Activation::kSwiglu: return "swiglu";
    case Activation::kClampedSwiglu: return "clamped_swiglu";
  }
  return "?";
}

// A template argument of kernels: the element type and the activation to compile for.
template <class T, Activation kWhich>
struct GluOf {
  using Element = T;
  static constexpr Activation kActivation = kWhich;
};

template <class Glu>
using ElementOf = typename Glu::Element;

// Calls f with the GluOf of T and `activation` as its template argument.
template <class T, class F>
auto with_activation(Activation activation, F&& f) {
  switch (activation) {
    case Activation::kSwiglu: break;
    case Activation::kClampedSwiglu:
      return f.template operator()<GluOf<T, Activation::kClampedSwiglu>>();
  }
  return f.template operator()<GluOf<T, Activation::kSwiglu>>();
}
template <class F>
auto with_glu(Format format, Activation activation, F&& f) {
  return format == Format::kBf16 ? with_activation<bf16>(activation, f)
                                 : with_activation<float>(activation, f);
}

}  // namespace moxie
