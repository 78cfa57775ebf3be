// How well a recipe represents a tensor, as a weight that forward multiplies with.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "moxie/cli/file/safetensors.h"

namespace moxie::cli {

// Of parts of a tensor, or of several tensors, it adds up.
struct Quality {
  double signal = 0, noise = 0;     // energy of the values, and of their errors
  double flushed = 0, clipped = 0;  // elements that became 0, and that were cut at 448
  double count = 0;                 // elements in all
  int smallest = std::numeric_limits<int>::max();  // exponents of the scales; those of blocks of
  int largest = std::numeric_limits<int>::min();   // zeros and of blocks with NaN do not count

  void add(const Quality& other);
  bool has_scales() const { return smallest <= largest; }
  // Signal to noise in dB: infinite where nothing is lost, NaN where a value is not finite.
  double sqnr_db() const;
};

// w as it is measured: bf16 as bf16, anything else as f32.
at::Tensor as_measured(const at::Tensor& w);

// w [G, N, K], bf16 or f32.
Quality measure(const at::Tensor& w, const std::string& recipe);

// Calls f with pieces of a tensor [N, K] or [G, N, K] of a file, each [g, n, k], none much larger
// than a few million elements or 128 rows; no block of a recipe lies in two of them.
void for_each_piece(const TensorEntry& entry, const std::function<void(const at::Tensor&)>& f);

// Whether 128 rows are too much to be in memory at once.
bool is_too_wide(const std::vector<int64_t>& shape);

}  // namespace moxie::cli
