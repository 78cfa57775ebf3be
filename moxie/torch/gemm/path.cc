#include "moxie/torch/gemm/path.h"

#include <atomic>
#include <optional>

#include "moxie/core/base/check.h"
#include "moxie/core/base/device.h"

namespace moxie::ops {
namespace {

constexpr int kNotForced = -1;
std::atomic<int> forced_path = kNotForced;
std::atomic<ForceOn> forced_on = ForceOn::kEveryDevice;
thread_local bool made_for_gpu = false;  // TracedLike

bool scales_by_128(const Recipe& recipe) {
  return recipe.activations == Block{1, 128} && recipe.weights == Block{128, 128};
}

// Every one is so long along the contraction.
bool has_blocks_of(int length, const Recipe& recipe) {
  return recipe.scaling == Scaling::kBlock && recipe.activations.cols == length &&
         recipe.weights.cols == length && recipe.weights_t().rows == length &&
         recipe.wgrad_dy.rows == length && recipe.wgrad_x.rows == length;
}

std::optional<Path> forced(c10::DeviceType device) {
  const bool here = forced_on.load() == ForceOn::kEveryDevice || device == c10::kCUDA;
  const int path = forced_path.load();
  if (!here || path == kNotForced) return std::nullopt;
  return static_cast<Path>(path);
}

bool can_multiply(Path path, const Recipe& recipe) {
  if (path == Path::kEmulated) return true;
  return (path == Path::kSm90Rows) == (recipe.scaling == Scaling::kRow);
}

// Empty: both are multiples, and there is something to multiply.
std::string why_not_multiples(const char* what, int64_t of, int64_t n, int64_t k) {
  if (n > 0 && n % of == 0 && k > 0 && k % of == 0) return "";
  return what + (" take multiples of " + std::to_string(of)) + ", got n = " + std::to_string(n) +
         " and k = " + std::to_string(k);
}

Choice if_no_reason(Path path, const std::string& reason) {
  return {reason.empty() ? path : Path::kEmulated, reason};
}

// What no device changes, but for a test that forces a path on GPUs alone.
std::optional<Choice> choose_for_any_device(const Recipe& recipe, c10::DeviceType device) {
  if (!recipe.quantizes()) return Choice{Path::kEmulated, "the recipe quantizes nothing"};
  if (recipe.kernels == Kernels::kEmulated)
    return Choice{Path::kEmulated, "the recipe asks for it"};
  if (const auto path = forced(device); path && can_multiply(*path, recipe))
    return Choice{*path, ""};
  return std::nullopt;
}

Choice choose_on_hopper(const Recipe& recipe, int64_t n, int64_t k) {
  const bool by_row = recipe.scaling == Scaling::kRow;
  if (!by_row && !scales_by_128(recipe))
    return {Path::kEmulated,
            "Hopper's FP8 tensor cores can afford a scale per 128 of the contraction, not per 32; "
            "mxfp8_rceil_128 is the recipe for it"};
  return if_no_reason(by_row ? Path::kSm90Rows : Path::kSm90,
                      why_not_multiples("Hopper's FP8 kernels", 16, n, k));
}

Choice choose_on_blackwell(const Recipe& recipe, int64_t n, int64_t k) {
  if (recipe.scaling == Scaling::kRow)
    return {Path::kEmulated, "torch's FP8 product with a scale per row is one for Hopper"};
  // The contraction of forward is k, that of dgrad n; both come in whole blocks of 32.
  return if_no_reason(Path::kSm100, why_not_multiples("block-scaled tensor cores", 32, n, k));
}

}  // namespace

c10::Device device_behind(const at::Tensor& tensor) {
  const bool of_gpu = tensor.key_set().has_backend(c10::BackendComponent::CUDABit);
  const bool traced = tensor.is_meta() && (of_gpu || made_for_gpu);
  return traced ? c10::Device(c10::kCUDA) : tensor.device();
}

TracedLike::TracedLike(const at::Tensor& like) : before_(made_for_gpu) {
  made_for_gpu = like.is_meta() && device_behind(like).is_cuda();
}
TracedLike::~TracedLike() { made_for_gpu = before_; }

bool sizes_matter(const Recipe& recipe, c10::Device device) {
  if (!device.is_cuda() || choose_for_any_device(recipe, device.type())) return false;
  const int capability = compute_capability(device.index());
  if (capability == 90) return recipe.scaling == Scaling::kRow || scales_by_128(recipe);
  return capability / 10 == 10 && recipe.scaling == Scaling::kBlock;
}

Choice choose_path(const Recipe& recipe, c10::Device device, int64_t n, int64_t k) {
  if (device.is_cuda()) return choose_path_on_gpu(recipe, compute_capability(device.index()), n, k);
  return choose_for_any_device(recipe, device.type())
      .value_or(Choice{Path::kEmulated, "a CPU has no FP8 product"});
}

Choice choose_path_on_gpu(const Recipe& recipe, int capability, int64_t n, int64_t k) {
  if (const auto choice = choose_for_any_device(recipe, c10::kCUDA)) return *choice;
  if (capability == 90) return choose_on_hopper(recipe, n, k);
  if (capability / 10 == 10) return choose_on_blackwell(recipe, n, k);
  return {Path::kEmulated, "no FP8 kernel for compute capability " +
                               std::to_string(capability / 10) + "." +
                               std::to_string(capability % 10)};
}

ScaleLayout choose_layout(const Recipe& recipe, Path path, c10::DeviceType device) {
  const auto if_blocks_of = [&](int length, ScaleLayout layout) {
    return has_blocks_of(length, recipe) ? layout : ScaleLayout::kPlain;
  };
  switch (path) {
    case Path::kSm90: return if_blocks_of(kQuadBlock, ScaleLayout::kQuads);
    case Path::kSm90Rows: return ScaleLayout::kPlain;
    case Path::kSm100: return ScaleLayout::kSwizzled;
    case Path::kEmulated: break;
  }
  const bool as_a_gpu = device == c10::kCUDA || forced(device) == Path::kEmulated;
  return as_a_gpu ? if_blocks_of(kMxBlock, ScaleLayout::kSwizzled) : ScaleLayout::kPlain;
}

std::string why_not_sm90_rows(const RowScaledPass& pass) {
  constexpr int64_t kMostGroups = 1023;
  if (pass.rows == 0) return "there is nothing to multiply";
  if (pass.result != at::kBFloat16)
    return "torch's product gives bf16, and other results would be rounded twice";
  if (pass.groups > kMostGroups)
    return "torch's product takes at most " + std::to_string(kMostGroups) + " groups, got " +
           std::to_string(pass.groups);
  if (!pass.aligned) return "torch's product takes operands that begin at a multiple of 16 bytes";
  return "";
}

void force_path(std::string_view text, ForceOn on) {
  if (text.empty()) {
    forced_path = kNotForced;
    return;
  }
  for (const Path path : {Path::kEmulated, Path::kSm90, Path::kSm90Rows, Path::kSm100})
    if (name(path) == text) {
      forced_on = on;
      forced_path = static_cast<int>(path);
      return;
    }
  fail("force_path: there is no path '", text, "'; there are emulated, sm90, sm90_rows, sm100");
}

}  // namespace moxie::ops
