#include "moxie/cli/inspect/quality.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/frexp.h>
#include <ATen/ops/isfinite.h>

#include <algorithm>
#include <cmath>

#include "moxie/torch/ops.h"
#include "moxie/torch/recipe.h"
#include "moxie/torch/stats.h"

namespace moxie::cli {
namespace {

constexpr int64_t kPieceElements = 1 << 22;
constexpr int64_t kTallestBlock = 128;

// int32 [..]: the exponents of the scales that say something.
at::Tensor exponents_of(const at::Tensor& w, const std::string& recipe) {
  const at::Tensor scale = std::get<1>(ops::quantize_weights(w, recipe));
  if (scale.scalar_type() == at::kFloat) {  // a power of two for each row
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

void for_each_piece(const at::Tensor& w, const std::function<void(const at::Tensor&)>& f) {
  const at::Tensor whole = w.dim() == 2 ? w.unsqueeze(0) : w;
  const int64_t groups = whole.size(0), rows = whole.size(1), cols = whole.size(2);
  const int64_t some_groups = std::clamp(kPieceElements / std::max<int64_t>(rows * cols, 1),
                                         int64_t{1}, std::max<int64_t>(groups, 1));
  const int64_t blocks = std::max<int64_t>(1, kPieceElements / (cols * kTallestBlock));
  const int64_t some_rows = std::min(rows, blocks * kTallestBlock);
  for (int64_t g = 0; g < groups; g += some_groups)
    for (int64_t r = 0; r < rows; r += some_rows) {
      f(whole.narrow(0, g, std::min(some_groups, groups - g))
            .narrow(1, r, std::min(some_rows, rows - r))
            .contiguous());
    }
}

}  // namespace moxie::cli
