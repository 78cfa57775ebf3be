// How well a recipe represents a tensor as a weight in forward.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "moxie/cli/file/safetensors.h"

namespace moxie::cli {

// Additive over parts of a tensor and over tensors.
struct Quality {
  double signal = 0, noise = 0;     // energy of the values, and of their errors
  double flushed = 0, clipped = 0;  // elements that became 0; that were clipped at 448
  double count = 0;                 // elements in all
  int smallest = std::numeric_limits<int>::max();  // exponents of the scales, except for blocks of
  int largest = std::numeric_limits<int>::min();   // zeros and blocks with NaN

  void add(const Quality& other);
  bool has_scales() const { return smallest <= largest; }
  // Signal-to-noise ratio in dB: infinite if nothing is lost, NaN if a value is not finite.
  double sqnr_db() const;
};

// Converts w for measuring: bf16 stays bf16, anything else becomes f32.
at::Tensor as_measured(const at::Tensor& w);

// w [G, N, K], bf16 or f32.
Quality measure(const at::Tensor& w, const std::string& recipe);

// Calls f with pieces [g, n, k] of a tensor [N, K] or [G, N, K] of a file. A piece has at most a
// few million elements, or 128 rows; no block of a recipe is in two pieces.
void for_each_piece(const TensorEntry& entry, const std::function<void(const at::Tensor&)>& f);

// Whether 128 rows are too large to be in memory at once.
bool is_too_wide(const std::vector<int64_t>& shape);

}  // namespace moxie::cli
