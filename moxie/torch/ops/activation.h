// Converts the activation argument of swiglu's ops: users give text, graphs carry an integer.
#pragma once

#include <c10/util/Exception.h>

#include <string_view>

#include "moxie/core/swiglu/activation.h"

namespace moxie::ops {

inline Activation parse_activation(const char* op, std::string_view text) {
  for (const Activation known : {Activation::kSwiglu, Activation::kClampedSwiglu})
    if (text == name(known)) return known;
  TORCH_CHECK_VALUE(false, op, ": activation must be 'swiglu' or 'clamped_swiglu', got '", text,
                    "'");
}

inline int64_t pack(Activation activation) { return static_cast<int64_t>(activation); }

inline Activation unpack_activation(const char* op, int64_t value) {
  TORCH_CHECK_VALUE(value >= 0 && value <= pack(Activation::kClampedSwiglu), op,
                    ": activation must be 0 or 1, got ", value);
  return static_cast<Activation>(value);
}

}  // namespace moxie::ops
