// Access to single elements of a FloatView, for the reference backends.
#pragma once

#include <cstddef>
#include <vector>

#include "moxie/core/base/view.h"
#include "moxie/core/format/bf16.h"

namespace moxie {

inline float value_at(const ConstFloatView& x, int64_t i) {
  return x.format == Format::kF32 ? static_cast<const float*>(x.data)[i]
                                  : to_float(static_cast<const bf16*>(x.data)[i]);
}

inline void put_value(const FloatView& out, int64_t i, float value) {
  if (out.format == Format::kF32)
    static_cast<float*>(out.data)[i] = value;
  else
    static_cast<bf16*>(out.data)[i] = to_bf16(value);
}

// An owning tensor, for intermediate results in the reference of a fused op.
struct Values {
  std::vector<std::byte> bytes;
  FloatView view;

  Values(Format format, const Shape& shape)
      : bytes(numel(shape) * bytes_of(format)), view{bytes.data(), format, shape} {}
  ConstFloatView in() const { return {view.data, view.format, view.shape}; }
};

}  // namespace moxie
