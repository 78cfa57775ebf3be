// Autocast kernels: activations are cast to autocast's dtype, as for torch's own matmuls. Weights
// are not cast: they are quantized from their own dtype, and a cast to bf16 would only lose bits.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "moxie/torch/autograd/expert_mlp.h"
#include "moxie/torch/autograd/node.h"
#include "moxie/torch/mx_tensor.h"
#include "moxie/torch/recipe.h"

namespace moxie::ops {
namespace {

template <c10::DeviceType kDevice>
Tensor cast(const Tensor& tensor) {
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(kDevice), tensor, kDevice);
}

constexpr c10::DispatchKey key_of(c10::DeviceType device) {
  return device == c10::DeviceType::CUDA ? c10::DispatchKey::AutocastCUDA
                                         : c10::DispatchKey::AutocastCPU;
}

template <c10::DeviceType kDevice>
Tensor grouped_mm_autocast(const Tensor& x, const Tensor& w, const OptionalTensor& offs,
                           std::string_view recipe, const OptionalTensor& bias,
                           std::optional<at::ScalarType> dtype, OptionalTensors quantized_w,
                           const OptionalTensor& main_grad) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(key_of(kDevice));
  return ops::grouped_mm(cast<kDevice>(x), w,
                         grouped_mm_options(offs, recipe, bias, dtype, quantized_w, main_grad));
}

template <c10::DeviceType kDevice>
Tensor grouped_mm_stats_autocast(const Tensor& x, const Tensor& w, const Tensor& stats,
                                 const OptionalTensor& offs, std::string_view recipe,
                                 const OptionalTensor& bias, std::optional<at::ScalarType> dtype,
                                 OptionalTensors quantized_w, const OptionalTensor& main_grad) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(key_of(kDevice));
  return ops::grouped_mm_stats(
      cast<kDevice>(x), w, stats,
      grouped_mm_options(offs, recipe, bias, dtype, quantized_w, main_grad));
}

// grouped_mm of an x that is quantized already: x is not cast, but y has autocast's dtype, unless
// dtype or the recipe names one.
template <c10::DeviceType kDevice>
Tensor grouped_mm_mx_autocast(const Tensor& x, const Tensor& qdata, const Tensor& scale,
                              const Tensor& w, const OptionalTensor& offs, std::string_view block,
                              std::string_view recipe, const OptionalTensor& bias,
                              std::optional<at::ScalarType> dtype, OptionalTensors quantized_w,
                              const OptionalTensor& main_grad) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(key_of(kDevice));
  constexpr const char* kOp = "grouped_mm";
  if (!dtype) dtype = with_op(kOp, [&] { return parse_recipe(recipe, kOp).out; });
  return ops::grouped_mm(
      MxTensor{qdata, scale, std::string(block), x}, w,
      grouped_mm_options(offs, recipe, bias,
                         dtype ? dtype : at::autocast::get_autocast_dtype(kDevice), quantized_w,
                         main_grad));
}

// x in autocast's dtype. If the node itself permutes x, the node casts it too, because it sums the
// gradients of a token's rows in the original dtype of x.
template <c10::DeviceType kDevice>
Tensor cast_unless_permuted(const Tensor& x, ExpertMlpOptions& options) {
  if (!options.slot_of) return cast<kDevice>(x);
  if (x.scalar_type() != at::kDouble) options.x_dtype = at::autocast::get_autocast_dtype(kDevice);
  return x;
}

template <c10::DeviceType kDevice>
Tensor expert_mlp_autocast(const Tensor& x, const Tensor& w13, const Tensor& w2,
                           const OptionalTensor& offs, std::string_view recipe,
                           OptionalTensors quantized_w13, OptionalTensors quantized_w2,
                           const OptionalTensor& main_grad13, const OptionalTensor& main_grad2,
                           const OptionalTensor& slot_of, const OptionalTensor& row_of,
                           int64_t top_k, const OptionalTensor& weights, std::string_view keep,
                           std::optional<at::ScalarType> x_dtype, std::string_view activation,
                           const OptionalTensor& b13, const OptionalTensor& b2,
                           std::string_view w13_layout) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(key_of(kDevice));
  ExpertMlpOptions options =
      mlp::options_of(offs, recipe, quantized_w13, quantized_w2, main_grad13, main_grad2, slot_of,
                      row_of, top_k, weights, keep, x_dtype, activation, b13, b2, w13_layout);
  return ops::expert_mlp(cast_unless_permuted<kDevice>(x, options), w13, w2, options);
}

template <c10::DeviceType kDevice>
Tensor expert_mlp_stats_autocast(const Tensor& x, const Tensor& w13, const Tensor& w2,
                                 const Tensor& stats, const OptionalTensor& offs,
                                 std::string_view recipe, OptionalTensors quantized_w13,
                                 OptionalTensors quantized_w2, const OptionalTensor& main_grad13,
                                 const OptionalTensor& main_grad2, const OptionalTensor& slot_of,
                                 const OptionalTensor& row_of, int64_t top_k,
                                 const OptionalTensor& weights, std::string_view keep,
                                 std::optional<at::ScalarType> x_dtype, std::string_view activation,
                                 const OptionalTensor& b13, const OptionalTensor& b2,
                                 std::string_view w13_layout) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(key_of(kDevice));
  ExpertMlpOptions options =
      mlp::options_of(offs, recipe, quantized_w13, quantized_w2, main_grad13, main_grad2, slot_of,
                      row_of, top_k, weights, keep, x_dtype, activation, b13, b2, w13_layout);
  return ops::expert_mlp_stats(cast_unless_permuted<kDevice>(x, options), w13, w2, stats, options);
}

template <c10::DeviceType kDevice>
Tensor expert_mlp_parallel_autocast(
    const Tensor& x, const Tensor& w13, const Tensor& w2, const Tensor& weights, const Tensor& offs,
    const Tensor& slot_of, const Tensor& row_of, std::string_view group, std::string_view recipe,
    std::string_view wire, OptionalTensors quantized_w13, OptionalTensors quantized_w2,
    const OptionalTensor& main_grad13, const OptionalTensor& main_grad2, std::string_view keep,
    std::optional<at::ScalarType> /*x_dtype*/, std::string_view activation,
    const OptionalTensor& b13, const OptionalTensor& b2, std::string_view w13_layout) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(key_of(kDevice));
  return ops::expert_mlp_parallel(x, w13, w2, weights, offs, slot_of, row_of, group,
                                  {.recipe = recipe,
                                   .wire = wire,
                                   .quantized_w13 = quantized_w13,
                                   .quantized_w2 = quantized_w2,
                                   .main_grad13 = main_grad13,
                                   .main_grad2 = main_grad2,
                                   .keep = keep,
                                   .x_dtype = at::autocast::get_autocast_dtype(kDevice),
                                   .activation = activation,
                                   .b13 = b13,
                                   .b2 = b2,
                                   .w13_layout = w13_layout});
}

template <c10::DeviceType kDevice>
Tensor expert_mlp_symmetric_autocast(
    const Tensor& x, const Tensor& w13, const Tensor& w2, const Tensor& weights, const Tensor& offs,
    const Tensor& slot_of, const Tensor& row_of, const Tensor& memory, const Tensor& status,
    at::IntArrayRef peers, at::IntArrayRef capacity, at::IntArrayRef limits, int64_t rank,
    int64_t timeout_ms, std::string_view group, std::string_view recipe, std::string_view wire,
    OptionalTensors quantized_w13, OptionalTensors quantized_w2, const OptionalTensor& main_grad13,
    const OptionalTensor& main_grad2, std::string_view keep,
    std::optional<at::ScalarType> /*x_dtype*/, std::string_view activation,
    const OptionalTensor& b13, const OptionalTensor& b2, std::string_view w13_layout) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(key_of(kDevice));
  return ops::expert_mlp_symmetric(x, w13, w2, weights, offs, slot_of, row_of, memory, status,
                                   peers, capacity, limits, rank, timeout_ms, group,
                                   {.recipe = recipe,
                                    .wire = wire,
                                    .quantized_w13 = quantized_w13,
                                    .quantized_w2 = quantized_w2,
                                    .main_grad13 = main_grad13,
                                    .main_grad2 = main_grad2,
                                    .keep = keep,
                                    .x_dtype = at::autocast::get_autocast_dtype(kDevice),
                                    .activation = activation,
                                    .b13 = b13,
                                    .b2 = b2,
                                    .w13_layout = w13_layout});
}

}  // namespace

TORCH_LIBRARY_IMPL(moxie, AutocastCPU, m) {
  m.impl("grouped_mm", TORCH_FN(grouped_mm_autocast<c10::DeviceType::CPU>));
  m.impl("grouped_mm.mx", TORCH_FN(grouped_mm_mx_autocast<c10::DeviceType::CPU>));
  m.impl("grouped_mm.stats", TORCH_FN(grouped_mm_stats_autocast<c10::DeviceType::CPU>));
  m.impl("expert_mlp", TORCH_FN(expert_mlp_autocast<c10::DeviceType::CPU>));
  m.impl("expert_mlp.stats", TORCH_FN(expert_mlp_stats_autocast<c10::DeviceType::CPU>));
  m.impl("expert_mlp.parallel", TORCH_FN(expert_mlp_parallel_autocast<c10::DeviceType::CPU>));
  m.impl("expert_mlp.symmetric", TORCH_FN(expert_mlp_symmetric_autocast<c10::DeviceType::CPU>));
}
TORCH_LIBRARY_IMPL(moxie, AutocastCUDA, m) {
  m.impl("grouped_mm", TORCH_FN(grouped_mm_autocast<c10::DeviceType::CUDA>));
  m.impl("grouped_mm.mx", TORCH_FN(grouped_mm_mx_autocast<c10::DeviceType::CUDA>));
  m.impl("grouped_mm.stats", TORCH_FN(grouped_mm_stats_autocast<c10::DeviceType::CUDA>));
  m.impl("expert_mlp", TORCH_FN(expert_mlp_autocast<c10::DeviceType::CUDA>));
  m.impl("expert_mlp.stats", TORCH_FN(expert_mlp_stats_autocast<c10::DeviceType::CUDA>));
  m.impl("expert_mlp.parallel", TORCH_FN(expert_mlp_parallel_autocast<c10::DeviceType::CUDA>));
  m.impl("expert_mlp.symmetric", TORCH_FN(expert_mlp_symmetric_autocast<c10::DeviceType::CUDA>));
}

}  // namespace moxie::ops
