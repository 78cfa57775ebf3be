#include "moxie/torch/gemm/path.h"

#include <atomic>

#include "moxie/core/base/check.h"
#include "moxie/core/base/device.h"

namespace moxie::ops {
namespace {

constexpr int kNotForced = -1;
std::atomic<int> forced_path = kNotForced;

bool scales_by_128(const Recipe& recipe) {
  return recipe.activations == Block{1, 128} && recipe.weights == Block{128, 128};
}

}  // namespace

Choice choose_path(const Recipe& recipe, c10::Device device, int64_t n, int64_t k) {
  if (!recipe.quantizes()) return {Path::kEmulated, "the recipe quantizes nothing"};
  if (recipe.kernels == Kernels::kEmulated) return {Path::kEmulated, "the recipe asks for it"};
  if (recipe.scaling == Scaling::kRow)
    return {Path::kEmulated, "one scale per row has no FP8 kernel here yet"};
  const int forced = forced_path.load();
  if (forced != kNotForced) return {static_cast<Path>(forced), ""};
  if (!device.is_cuda()) return {Path::kEmulated, "a CPU has no FP8 product"};
  const int capability = compute_capability(device.index());
  if (capability / 10 == 10) {
    // The contraction of forward is k, that of dgrad n; both come in whole blocks of 32.
    if (n % 32 == 0 && k % 32 == 0) return {Path::kSm100, ""};
    return {Path::kEmulated, "block-scaled tensor cores take multiples of 32, got n = " +
                                 std::to_string(n) + " and k = " + std::to_string(k)};
  }
  if (capability == 90) {
    if (!scales_by_128(recipe))
      return {
          Path::kEmulated,
          "Hopper's FP8 tensor cores can afford a scale per 128 of the contraction, not per 32; "
          "mxfp8_rceil_128 is the recipe for it"};
    if (n % 16 == 0 && k % 16 == 0) return {Path::kSm90, ""};
    return {Path::kEmulated, "the FP8 kernel takes multiples of 16, got n = " + std::to_string(n) +
                                 " and k = " + std::to_string(k)};
  }
  return {Path::kEmulated, "no FP8 kernel for compute capability " +
                               std::to_string(capability / 10) + "." +
                               std::to_string(capability % 10)};
}

void force_path(std::string_view text) {
  if (text.empty()) {
    forced_path = kNotForced;
    return;
  }
  for (const Path path : {Path::kEmulated, Path::kSm90, Path::kSm100})
    if (name(path) == text) {
      forced_path = static_cast<int>(path);
      return;
    }
  fail("force_path: there is no path '", text, "'; there are emulated, sm90, sm100");
}

}  // namespace moxie::ops
