// requantize of rows that lie apart, for callers that are never part of a compiled graph.
#pragma once

#include <optional>

#include "moxie/core/copy_rows/copy_rows.h"
#include "moxie/torch/ops/quantize.h"

namespace moxie::ops {

struct RowsApart {
  RowsIn<const std::byte> qdata;
  int64_t rows, columns;
  const Tensor& scale;  // of the rows, together
};
// The colwise form and its scales. nullopt: this device reads only rows that lie together.
std::optional<Quantized> requantize_apart(const RowsApart& x, const OptionalTensor& offs,
                                          const RequantizeSpec& spec);

}  // namespace moxie::ops
