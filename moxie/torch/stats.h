// Statistics of quantization errors. They stay on the device until they are read:
//
// clang-format off
//   at::Tensor total = at::zeros({6, 5}, at::kDouble);   // one row per operand, see kStatsParts
//   y = moxie::ops::grouped_mm(x, w, {.offs = offs, .stats = total});  // backward adds dy's rows
//   moxie::sqnr(total)                                   // dB, [6]
// clang-format on
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

namespace moxie {

// The statistics of an operand: the energy of its values and of their errors, the number of
// elements that became 0, that were clipped at 448, and in all. Each is a sum over calls.
inline constexpr std::array kStats = {"signal", "noise", "flushed", "clipped", "count"};

// The operands of a linear: x and w in forward, x in wgrad, w in dgrad, and dy in dgrad and wgrad.
inline constexpr std::array kStatsParts = {"x", "w", "x_t", "w_t", "dy", "dy_t"};

inline constexpr int64_t kNumStats = kStats.size(), kNumStatsParts = kStatsParts.size();

// Signal-to-noise ratio in dB: [.., 5] -> [..], on the device. Infinite if nothing is lost.
at::Tensor sqnr(const at::Tensor& stats);

}  // namespace moxie
