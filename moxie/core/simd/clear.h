// Zeroes the bytes of a result that no tile writes.
#pragma once

#include <cstring>

#include "moxie/core/base/parallel.h"
#include "moxie/core/layout/check_args.h"
#include "moxie/core/simd/walk.h"

namespace moxie::cpu {

// Zeroes columns [begin, end) of `rows` rows that are `end` bytes wide.
inline void clear_columns(const Exec& exec, void* data, int64_t rows, int64_t begin, int64_t end) {
  if (begin == end) return;
  parallel_for(exec, rows, 256, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r)
      std::memset(static_cast<uint8_t*>(data) + r * end + begin, 0, end - begin);
  });
}

inline void clear_bytes(const Exec& exec, void* data, int64_t count) {
  constexpr int64_t kGrain = 1 << 18;
  parallel_for(exec, count, kGrain, [&](int64_t begin, int64_t end) {
    std::memset(static_cast<uint8_t*>(data) + begin, 0, end - begin);
  });
}

// Zeroes rows that no group covers, the end of a colwise buffer past its last group, and all scales
// that are not plain: their padding is scattered, and they are at most 1/32 of the elements.
inline void clear_rest(const Exec& exec, const QuantizedOut& out, Form form, const Panels& panels,
                       const Walk& walk) {
  const bool plain = out.layout == ScaleLayout::kPlain;
  if (!plain) clear_bytes(exec, out.scale.data, numel(out.scale.shape));
  if (panels.weights) return;
  if (form == Form::kRowwise) {
    const int64_t row = walk.covered_rows();
    if (row == panels.rows) return;
    const int64_t width = out.scale.dim(1);
    clear_bytes(exec, out.qdata.data + row * panels.cols, (panels.rows - row) * panels.cols);
    if (plain) clear_bytes(exec, out.scale.data + row * width, (panels.rows - row) * width);
    return;
  }
  const int64_t k = walk.padded_rows(), k_block = out.block.rows;
  clear_columns(exec, out.qdata.data, panels.cols, k, out.qdata.dim(1));
  if (plain) clear_columns(exec, out.scale.data, out.scale.dim(0), k / k_block, out.scale.dim(1));
}

}  // namespace moxie::cpu
