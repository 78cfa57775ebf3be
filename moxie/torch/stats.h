// What quantization loses, as numbers that stay on the device until somebody reads them:
//
//   at::Tensor total = at::zeros({6, 5}, at::kDouble);            // one row per operand,
//   kStatsParts y = moxie::ops::grouped_mm(x, w, {.offs = offs, .stats = total});   // backward
//   adds dy's moxie::sqnr(total)                                            // dB, [6]
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

namespace moxie {

// Of one operand: the energy of its values and of their errors, how many elements became 0, how
// many were clipped at 448, how many there are. Each adds up over calls.
inline constexpr std::array kStats = {"signal", "noise", "flushed", "clipped", "count"};

// The operands of a product: those of forward, the transposed forms that wgrad and dgrad contract,
// and the gradient, for dgrad and for wgrad.
inline constexpr std::array kStatsParts = {"x", "w", "x_t", "w_t", "dy", "dy_t"};

inline constexpr int64_t kNumStats = kStats.size(), kNumStatsParts = kStatsParts.size();

// Signal to noise in dB: [.., 5] -> [..], on the device. Infinite where nothing is lost.
at::Tensor sqnr(const at::Tensor& stats);

}  // namespace moxie
