// The least that an op must do: FLOPs, and bytes through memory if each input is read once and each
// output written once. Benchmarks and plots divide by these numbers only.
#pragma once

#include <optional>

#include "moxie/core/layout/shape.h"

namespace moxie {

struct Cost {
  double flops = 0;
  double bytes_read = 0;
  double bytes_written = 0;

  constexpr double bytes() const { return bytes_read + bytes_written; }
};

// `rowwise` and `colwise` are the blocks of the forms to make; nullopt if a form is not made.
struct QuantizeCostArgs {
  Shape x;
  Format format = Format::kBf16;
  std::optional<int64_t> num_groups = std::nullopt;
  std::optional<Block> rowwise = std::nullopt, colwise = std::nullopt;
  ScaleLayout layout = ScaleLayout::kPlain;
};
Cost quantize_cost(const QuantizeCostArgs& args);
Cost dequantize_cost(const Shape& x, Format format, Form form, Block block,
                     std::optional<int64_t> num_groups, ScaleLayout layout = ScaleLayout::kPlain);
struct RequantizeCostArgs {
  Shape x;
  std::optional<int64_t> num_groups = std::nullopt;
  Block rowwise = {1, 32}, colwise = {32, 1};
  ScaleLayout layout = ScaleLayout::kPlain;       // of the colwise scales, which are written
  ScaleLayout from_layout = ScaleLayout::kPlain;  // of the rowwise scales, which are read
};
Cost requantize_cost(const RequantizeCostArgs& args);
Cost row_scale_cost(const Shape& x, Format format, Form form, std::optional<int64_t> num_groups);
// R rows are read; every row of the padded buffer is written.
Cost pad_groups_cost(int64_t rows, int64_t row_bytes, int64_t num_groups, int64_t alignment);
Cost unpad_groups_cost(int64_t rows, int64_t row_bytes);
Cost swizzle_cost(const Shape& plain, const Shape& swizzled);

// y [R, N] = x [R, K] @ w[g] [N, K]^T; dgrad and wgrad cost the same FLOPs. Only rows in a group
// count.
double grouped_mm_flops(int64_t rows, int64_t n, int64_t k);

}  // namespace moxie
