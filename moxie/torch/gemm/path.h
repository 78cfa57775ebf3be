// Which kernels a recipe takes, decided here and nowhere else.
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "moxie/core/layout/swizzle.h"
#include "moxie/torch/recipe.h"

namespace moxie::ops {

enum class Path : uint8_t {
  kEmulated,  // decode, then the product of the device: exact numerics, anywhere
  kSm90,      // Hopper: our FP8 GEMM, where core's why_not_sm90() has no objection; else emulated
  kSm100,     // Blackwell: torch's block-scaled GEMM
};

struct Choice {
  Path path;
  std::string reason;  // why not a faster one; empty on the fastest
};

// n and k are those of w [G, n, k].
Choice choose_path(const Recipe& recipe, c10::Device device, int64_t n, int64_t k);

// The layout in which a path's GEMM reads scales.
constexpr ScaleLayout layout_of(Path path) {
  return path == Path::kSm100 ? ScaleLayout::kSwizzled : ScaleLayout::kPlain;
}

constexpr const char* name(Path path) {
  return path == Path::kEmulated ? "emulated" : path == Path::kSm90 ? "sm90" : "sm100";
}

// For tests: as if choose_path() had chosen it on every device; an empty name ends that.
void force_path(std::string_view name);

}  // namespace moxie::ops
