#include "moxie/cli/inspect/quality.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/frexp.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/isfinite.h>

#include <algorithm>
#include <cmath>

#include "moxie/cli/file/tensors.h"
#include "moxie/torch/ops.h"
#include "moxie/torch/recipe.h"
#include "moxie/torch/stats.h"

namespace moxie::cli {
namespace {

constexpr int64_t kPieceElements = 1 << 22;
constexpr int64_t kTallestBlock = 128;
// The most elements of a piece. A piece holds whole rows, as some recipes have one scale per row,
// and 128 of them, as blocks can be that tall. With 2^23 elements memory stays below 1 GB; with
// 2^24 it took 1.2 GB.
constexpr int64_t kMostPieceElements = 1 << 23;

// The exponents of a tensor's scales, int32, except for blocks of zeros and blocks with NaN.
at::Tensor exponents_of(const at::Tensor& w, const std::string& recipe) {
  const at::Tensor scale = std::get<1>(ops::quantize_weights(w, recipe));
  if (scale.scalar_type() == at::kFloat) {  // f32: one power of two per row
    const auto [mantissa, exponent] = at::frexp(scale);
    const at::Tensor counts = at::isfinite(scale) & (w != 0).any(-1);
    return (exponent - 1).masked_select(counts);
  }
  constexpr int64_t kZeros = 0, kNan = 255, kBias = 127;
  const at::Tensor codes = scale.view(at::kByte);
  return codes.masked_select((codes != kZeros) & (codes != kNan)).to(at::kInt) - kBias;
}

}  // namespace

void Quality::add(const Quality& other) {
  signal += other.signal;
  noise += other.noise;
  flushed += other.flushed;
  clipped += other.clipped;
  count += other.count;
  smallest = std::min(smallest, other.smallest);
  largest = std::max(largest, other.largest);
}

double Quality::sqnr_db() const {
  return noise == 0 ? std::numeric_limits<double>::infinity() : 10 * std::log10(signal / noise);
}

at::Tensor as_measured(const at::Tensor& w) {
  return w.scalar_type() == at::kBFloat16 ? w : w.to(at::kFloat);
}

Quality measure(const at::Tensor& w, const std::string& recipe) {
  const at::Tensor stats = ops::quantization_stats(w, {.recipe = recipe, .part = "w"});
  const double* sums = stats.const_data_ptr<double>();
  static_assert(kNumStats == 5);
  Quality quality{.signal = sums[0],
                  .noise = sums[1],
                  .flushed = sums[2],
                  .clipped = sums[3],
                  .count = sums[4]};
  if (!ops::parse_recipe(recipe, "inspect").quantizes()) return quality;
  const at::Tensor exponents = exponents_of(w, recipe);
  if (exponents.numel() == 0) return quality;
  const auto [smallest, largest] = at::aminmax(exponents);
  quality.smallest = smallest.item<int>();
  quality.largest = largest.item<int>();
  return quality;
}

bool is_too_wide(const std::vector<int64_t>& shape) {
  const int64_t cols = shape.back(), rows = std::min(shape[shape.size() - 2], kTallestBlock);
  return cols > kMostPieceElements / std::max<int64_t>(rows, 1);
}

void for_each_piece(const TensorEntry& entry, const std::function<void(const at::Tensor&)>& f) {
  const at::ScalarType type = scalar_type_of(entry);
  const auto element = static_cast<int64_t>(c10::elementSize(type));
  const std::vector<int64_t>& shape = entry.shape;
  const int64_t groups = shape.size() == 2 ? 1 : shape[0];
  const int64_t rows = shape[shape.size() - 2], cols = shape.back();
  const at::Tensor whole = at::from_blob(const_cast<char*>(entry.bytes.data()),
                                         {groups, rows, cols * element}, at::kByte);
  const bool is_aligned = reinterpret_cast<uintptr_t>(entry.bytes.data()) % element == 0;
  const int64_t some_groups = std::clamp(kPieceElements / std::max<int64_t>(rows * cols, 1),
                                         int64_t{1}, std::max<int64_t>(groups, 1));
  const int64_t blocks = std::max<int64_t>(1, kPieceElements / (cols * kTallestBlock));
  const int64_t some_rows = std::min(rows, blocks * kTallestBlock);
  at::Tensor copy;  // a piece, if the file's bytes are not aligned
  for (int64_t g = 0; g < groups; g += some_groups)
    for (int64_t r = 0; r < rows; r += some_rows) {
      const at::Tensor bytes = whole.narrow(0, g, std::min(some_groups, groups - g))
                                   .narrow(1, r, std::min(some_rows, rows - r))
                                   .contiguous();
      if (!is_aligned) {
        if (!copy.defined() || copy.sizes() != bytes.sizes()) copy = at::empty_like(bytes);
        copy.copy_(bytes);
      }
      f((is_aligned ? bytes : copy).view(type));
    }
}

}  // namespace moxie::cli
