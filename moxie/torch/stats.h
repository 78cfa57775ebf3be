// Statistics of quantization errors, summed up on the device until they are read:
//
// clang-format off
//   at::Tensor total = at::zeros({6, 5}, at::kDouble);  // one row per operand, see kStatsParts
//   y = moxie::ops::grouped_mm_stats(x, w, total, {.offs = offs});  // backward adds dy's rows
//   moxie::sqnr(total)                                  // dB, [6]
// clang-format on
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

namespace moxie {

// The sums that describe an operand's quantization error: energy of the values, energy of the
// errors, number of elements that became 0, number that were clipped at 448, number of elements.
// Calls add to them.
inline constexpr std::array kStats = {"signal", "noise", "flushed", "clipped", "count"};

// The operands of a linear layer's products: x and w in forward, x_t in wgrad, w_t in dgrad, dy in
// dgrad and dy_t in wgrad.
inline constexpr std::array kStatsParts = {"x", "w", "x_t", "w_t", "dy", "dy_t"};

inline constexpr int64_t kNumStats = kStats.size(), kNumStatsParts = kStatsParts.size();

// Signal-to-noise ratio in dB, computed on the device: [.., 5] -> [..]. Infinite if nothing is
// lost.
at::Tensor sqnr(const at::Tensor& stats);

}  // namespace moxie
