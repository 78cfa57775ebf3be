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
// The rowwise form -> qdata_t, scale_t. scale_layout is that of the result.
std::tuple<at::Tensor, at::Tensor> requantize(const at::Tensor& qdata, const at::Tensor& scale,
                                              const QuantizeOptions& options = {});

struct DequantizeOptions {
  std::optional<at::Tensor> offs = std::nullopt;
  std::optional<std::string_view> block = std::nullopt;  // 1x32 rowwise, 32x1 colwise
  at::ScalarType dtype = at::kBFloat16;                  // or kFloat
};

at::Tensor dequantize_rowwise(const at::Tensor& qdata, const at::Tensor& scale,
                              const DequantizeOptions& options = {});
at::Tensor dequantize_colwise(const at::Tensor& qdata_t, const at::Tensor& scale_t,
                              const c10::SymInt& num_rows, const DequantizeOptions& options = {});

std::tuple<at::Tensor, at::Tensor> quantize_per_row(
    const at::Tensor& x, const std::optional<at::Tensor>& offs = std::nullopt);
std::tuple<at::Tensor, at::Tensor> quantize_per_col(
    const at::Tensor& x, const std::optional<at::Tensor>& offs = std::nullopt);

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

}  // namespace moxie::ops
