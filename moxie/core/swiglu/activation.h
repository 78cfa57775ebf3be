// What the swiglu family computes of gate and up. NUMERICS.md, section 8, has the order of
// roundings.
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

// gpt-oss's constants: 1.702 makes g * sigmoid(1.702 g) close to GELU; outside of the limit values
// are cut off, and gradients are 0.
inline constexpr float kClampAlpha = 1.702f, kClampLimit = 7.f;

constexpr const char* name(Activation activation) {
  switch (activation) {
    case Activation::kSwiglu: return "swiglu";
    case Activation::kClampedSwiglu: return "clamped_swiglu";
  }
  return "?";
}

// An activation of elements of one type, for kernels to be compiled for.
template <class T, Activation kWhich>
struct GluOf {
  using Element = T;
  static constexpr Activation kActivation = kWhich;
};

template <class Glu>
using ElementOf = typename Glu::Element;

// Calls f with the GluOf that is asked for.
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
