// Measures how well a recipe represents a tensor if the tensor is forward's weight.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "moxie/cli/file/safetensors.h"

namespace moxie::cli {

// How much a recipe loses. Qualities of parts of a tensor, or of tensors, can be added up.
struct Quality {
  double signal = 0, noise = 0;     // energy of the values, and of their errors
  double flushed = 0, clipped = 0;  // elements that became 0; that were clipped at 448
  double count = 0;                 // elements in all
  // Exponents of the smallest and the largest scale; blocks of zeros or with NaN do not count.
  int smallest = std::numeric_limits<int>::max();
  int largest = std::numeric_limits<int>::min();

  void add(const Quality& other);
  bool has_scales() const { return smallest <= largest; }
  // Signal-to-noise ratio in dB: infinite if nothing is lost, NaN if a value is not finite.
  double sqnr_db() const;
};

// Returns w in the dtype in which it is measured: bf16 stays bf16, anything else becomes f32.
at::Tensor as_measured(const at::Tensor& w);

// Measures w [G, N, K], bf16 or f32.
Quality measure(const at::Tensor& w, const std::string& recipe);

// Calls f with pieces [g, n, k] of a file's tensor [N, K] or [G, N, K]. A piece has at most a few
// million elements, or 128 rows if those are more. No block of a recipe is split between two
// pieces.
void for_each_piece(const TensorEntry& entry, const std::function<void(const at::Tensor&)>& f);

// Whether the tensor is not measured because 128 of its rows have too many elements for one piece.
bool is_too_wide(const std::vector<int64_t>& shape);

}  // namespace moxie::cli
