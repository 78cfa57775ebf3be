// The ops for C++ callers: the functions of torch.ops.moxie (schema.cc), through the dispatcher.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace moxie::ops {

struct QuantizeOptions {
  std::optional<at::Tensor> offs = std::nullopt;  // int32 [G], exclusive ends; tokens only
  std::string_view rowwise_block = "1x32";
  std::string_view colwise_block = "32x1";
  std::string_view rule = "rceil";
  std::string_view scale_layout = "plain";
};

// x [R, C] or [G, N, K] -> qdata, scale
std::tuple<at::Tensor, at::Tensor> quantize_rowwise(const at::Tensor& x,
                                                    const QuantizeOptions& options = {});
// -> qdata_t, scale_t
std::tuple<at::Tensor, at::Tensor> quantize_colwise(const at::Tensor& x,
                                                    const QuantizeOptions& options = {});
// -> qdata, scale, qdata_t, scale_t
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> quantize_both(
    const at::Tensor& x, const QuantizeOptions& options = {});
// The same into tensors that are there already.
void quantize_both_out(const at::Tensor& x, const QuantizeOptions& options, const at::Tensor& qdata,
                       const at::Tensor& scale, const at::Tensor& qdata_t,
                       const at::Tensor& scale_t);

struct RequantizeOptions {
  std::optional<at::Tensor> offs = std::nullopt;
  std::string_view block = "1x32";  // of what is read
  std::string_view colwise_block = "32x1";
  std::string_view rule = "rceil";
  std::string_view scale_layout = "plain";  // of the result
  std::string_view from_layout = "plain";   // of the scales that are read
};
// The rowwise form -> qdata_t, scale_t
std::tuple<at::Tensor, at::Tensor> requantize(const at::Tensor& qdata, const at::Tensor& scale,
                                              const RequantizeOptions& options = {});

struct DequantizeOptions {
  std::optional<at::Tensor> offs = std::nullopt;
  std::optional<std::string_view> block = std::nullopt;  // 1x32 rowwise, 32x1 colwise
  at::ScalarType dtype = at::kBFloat16;                  // or kFloat
  std::string_view scale_layout = "plain";
};

at::Tensor dequantize_rowwise(const at::Tensor& qdata, const at::Tensor& scale,
                              const DequantizeOptions& options = {});
at::Tensor dequantize_colwise(const at::Tensor& qdata_t, const at::Tensor& scale_t,
                              const c10::SymInt& num_rows, const DequantizeOptions& options = {});

std::tuple<at::Tensor, at::Tensor> quantize_per_row(
    const at::Tensor& x, const std::optional<at::Tensor>& offs = std::nullopt);
std::tuple<at::Tensor, at::Tensor> quantize_per_col(
    const at::Tensor& x, const std::optional<at::Tensor>& offs = std::nullopt);

void quantize_per_row_out(const at::Tensor& x, const std::optional<at::Tensor>& offs,
                          const at::Tensor& qdata, const at::Tensor& scale);
void quantize_per_col_out(const at::Tensor& x, const std::optional<at::Tensor>& offs,
                          const at::Tensor& qdata_t, const at::Tensor& scale_t);

at::Tensor swizzle_scale(const at::Tensor& scale,
                         const std::optional<at::Tensor>& offs = std::nullopt,
                         std::string_view form = "rowwise");
at::Tensor unswizzle_scale(const at::Tensor& swizzled, const c10::SymInt& rows,
                           const c10::SymInt& cols,
                           const std::optional<at::Tensor>& offs = std::nullopt,
                           std::string_view form = "rowwise");
at::Tensor replicate_scale(const at::Tensor& scale, const c10::SymInt& outer, const c10::SymInt& k,
                           std::string_view block, std::string_view form = "rowwise");
at::Tensor compact_scale(const at::Tensor& scale, std::string_view block,
                         std::string_view form = "rowwise");

// -> padded, starts, ends
std::tuple<at::Tensor, at::Tensor, at::Tensor> pad_groups(const at::Tensor& x,
                                                          const at::Tensor& offs,
                                                          int64_t alignment = 32);
at::Tensor unpad_groups(const at::Tensor& padded, const at::Tensor& offs, const at::Tensor& starts,
                        const c10::SymInt& num_rows);
at::Tensor padded_offs(const at::Tensor& offs, int64_t alignment = 32);

struct GroupedMmOptions {
  std::optional<at::Tensor> offs = std::nullopt;  // absent: one group
  std::string_view recipe = "mxfp8_rceil_128";    // recipe.h
  std::optional<at::Tensor> bias = std::nullopt;  // [N] or [G, N]
  std::optional<at::ScalarType> dtype = std::nullopt;
  std::optional<at::ArrayRef<at::Tensor>> quantized_w = std::nullopt;  // quantize_weights' of w
  std::optional<at::Tensor> main_grad = std::nullopt;  // f32 [G, N, K], which backward adds dw to
  std::optional<at::Tensor> stats = std::nullopt;      // f64 [6, 5]: stats.h
};
// y = x w^T by groups of rows; differentiable. x [R, K], w [G, N, K] -> [R, N]
at::Tensor grouped_mm(const at::Tensor& x, const at::Tensor& w,
                      const GroupedMmOptions& options = {});
// How tokens [T, D] become rows [R, D]: what route says. Absent: they are rows already.
struct Permutation {
  std::optional<at::Tensor> slot_of = std::nullopt, row_of = std::nullopt;
  int64_t top_k = 1;
};

struct ExpertMlpOptions {
  std::optional<at::Tensor> offs = std::nullopt;
  std::string_view recipe = "mxfp8_rceil_128";
  std::optional<at::ArrayRef<at::Tensor>> quantized_w13 = std::nullopt, quantized_w2 = std::nullopt;
  std::optional<at::Tensor> main_grad13 = std::nullopt, main_grad2 = std::nullopt;
  Permutation permutation = {};                          // with one, x is tokens
  std::optional<at::ScalarType> x_dtype = std::nullopt;  // x is rounded to it first, dx is not
};
// grouped_mm with w13 [G, 2F, D], swiglu, grouped_mm with w2 [G, D, F], as one node. x is rows, or
// tokens that are permuted first: where they are quantized, without their rows in memory.
at::Tensor expert_mlp(const at::Tensor& x, const at::Tensor& w13, const at::Tensor& w2,
                      const ExpertMlpOptions& options = {});

// x [T, D], weight [E, D] -> f32 [T, E]; differentiable
at::Tensor gate_logits(const at::Tensor& x, const at::Tensor& weight);
// scores [T, E] -> ids int32 [T, k]
at::Tensor top_k(const at::Tensor& scores, int64_t k);
// ids -> offs, slot_of, row_of
std::tuple<at::Tensor, at::Tensor, at::Tensor> route(const at::Tensor& ids, int64_t num_experts);
at::Tensor permute(const at::Tensor& x, const at::Tensor& slot_of, const at::Tensor& row_of,
                   int64_t top_k, const std::optional<at::Tensor>& weights = std::nullopt);
at::Tensor unpermute(const at::Tensor& rows, const at::Tensor& slot_of, const at::Tensor& row_of,
                     const c10::SymInt& num_tokens,
                     const std::optional<at::Tensor>& weights = std::nullopt);
at::Tensor unpermute_weights(const at::Tensor& dout, const at::Tensor& rows,
                             const at::Tensor& row_of, const c10::SymInt& top_k);

at::Tensor swiglu(const at::Tensor& h);
at::Tensor swiglu_backward(const at::Tensor& da, const at::Tensor& h);
// quantize_rowwise and quantize_both of those two results, and of permute's rows, without them in
// memory; options.colwise_block is for both forms.
std::tuple<at::Tensor, at::Tensor> swiglu_quantize_rowwise(const at::Tensor& h,
                                                           const QuantizeOptions& options = {});
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> swiglu_quantize_both(
    const at::Tensor& h, const QuantizeOptions& options = {});
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> swiglu_backward_quantize_both(
    const at::Tensor& da, const at::Tensor& h, const QuantizeOptions& options = {});
std::tuple<at::Tensor, at::Tensor> permute_quantize_rowwise(const at::Tensor& x,
                                                            const at::Tensor& slot_of,
                                                            int64_t top_k,
                                                            const QuantizeOptions& options = {});
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> permute_quantize_both(
    const at::Tensor& x, const at::Tensor& slot_of, int64_t top_k,
    const QuantizeOptions& options = {});
at::Tensor sum_groups(const at::Tensor& x, const std::optional<at::Tensor>& offs = std::nullopt);

struct StatsOptions {
  std::optional<at::Tensor> offs = std::nullopt;
  std::string_view recipe = "mxfp8_rceil_128";
  std::optional<std::string_view> part = std::nullopt;  // kStatsParts; by the dims of x
};
// How well a recipe represents x: f64 [5], kStats (stats.h).
at::Tensor quantization_stats(const at::Tensor& x, const StatsOptions& options = {});
// total += addend, but not in what a checkpoint repeats during backward.
void add_once_(const at::Tensor& total, const at::Tensor& addend);

// The passes of grouped_mm on operands as the quantizers make them.
struct GemmOptions {
  std::optional<at::Tensor> offs = std::nullopt;
  std::string_view recipe = "mxfp8_rceil_128";
  std::optional<at::Tensor> bias = std::nullopt;       // forward
  std::optional<at::ScalarType> dtype = std::nullopt;  // of the result; bf16
  // Of the scales of tokens; swizzled on Blackwell and plain elsewhere if absent.
  std::optional<std::string_view> scale_layout = std::nullopt;
};
at::Tensor grouped_fwd(const at::Tensor& x, const std::optional<at::Tensor>& x_scale,
                       const at::Tensor& w, const std::optional<at::Tensor>& w_scale,
                       const GemmOptions& options = {});
at::Tensor grouped_dgrad(const at::Tensor& dy, const std::optional<at::Tensor>& dy_scale,
                         const at::Tensor& w_t, const std::optional<at::Tensor>& w_scale_t,
                         const GemmOptions& options = {});
at::Tensor grouped_wgrad(const at::Tensor& dy_t, const std::optional<at::Tensor>& dy_scale_t,
                         const at::Tensor& x_t, const std::optional<at::Tensor>& x_scale_t,
                         const c10::SymInt& num_rows, const GemmOptions& options = {});
void grouped_wgrad_add_(const at::Tensor& dw, const at::Tensor& dy_t,
                        const std::optional<at::Tensor>& dy_scale_t, const at::Tensor& x_t,
                        const std::optional<at::Tensor>& x_scale_t, const c10::SymInt& num_rows,
                        const GemmOptions& options = {});

// Both forms of w as a recipe wants them: qdata, scale, qdata_t, scale_t
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> quantize_weights(
    const at::Tensor& w, std::string_view recipe = "mxfp8_rceil_128");
// The same into tensors that are there already: a weight cache after an optimizer step.
void quantize_weights_out(const at::Tensor& w, std::string_view recipe, const at::Tensor& qdata,
                          const at::Tensor& scale, const at::Tensor& qdata_t,
                          const at::Tensor& scale_t);

}  // namespace moxie::ops
