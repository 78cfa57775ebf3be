// Where patches come from: bf16 or f32 in memory, or the rowwise form.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "moxie/core/base/view.h"
#include "moxie/core/layout/patch.cuh"

namespace moxie::cuda {

// Eight elements as words; those from `count` on are 0.
template <bool kAligned, class T, int kWords>
__device__ void load_row(const T* from, int count, uint32_t (&word)[kWords]) {
  constexpr int kPerWord = kPatch / kWords;
  if constexpr (kAligned) {
#pragma unroll
    for (uint32_t& w : word) w = 0;
    if (count <= 0) return;
    if constexpr (kWords == 2) {
      const uint2 two = *reinterpret_cast<const uint2*>(from);
      word[0] = two.x, word[1] = two.y;
    } else {
#pragma unroll
      for (int k = 0; k < kWords; k += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(from + k * kPerWord);
        word[k] = four.x, word[k + 1] = four.y, word[k + 2] = four.z, word[k + 3] = four.w;
      }
    }
  } else {
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      word[k] = 0;
#pragma unroll
      for (int j = 0; j < kPerWord; ++j)
        if (k * kPerWord + j < count) {
          uint32_t bits;
          if constexpr (sizeof(T) == 4)
            bits = std::bit_cast<uint32_t>(from[k]);
          else
            bits = from[k * kPerWord + j].bits;
          word[k] |= bits << j * (32 / kPerWord);
        }
    }
  }
}

// The reverse; elements from `count` on are left alone.
template <bool kAligned, class T, int kWords>
__device__ void store_row(T* to, int count, const uint32_t (&word)[kWords]) {
  constexpr int kPerWord = kPatch / kWords;
  if constexpr (kAligned) {
    if (count <= 0) return;
#pragma unroll
    for (int k = 0; k < kWords; k += 4)
      *reinterpret_cast<uint4*>(to + k * kPerWord) =
          uint4{word[k], word[k + 1], word[k + 2], word[k + 3]};
  } else {
#pragma unroll
    for (int j = 0; j < kPatch; ++j) {
      if (j >= count) break;
      if constexpr (sizeof(T) == 4)
        to[j] = std::bit_cast<float>(word[j]);
      else
        to[j] = {static_cast<uint16_t>(word[j / 2] >> 16 * (j % 2))};
    }
  }
}

// kAligned: every tensor of the op is, so that all accesses are of 8 or 16 bytes.
template <class T, bool kIsAligned>
struct FloatSource {
  using Element = T;
  static constexpr bool kAligned = kIsAligned;
  static constexpr int kCtas = sizeof(T) == 2 ? 3 : 2;  // per SM: what registers allow
  static constexpr int64_t kLongestRun = 2;             // tiles; longer ones spread CTAs over rows
  // A tile of bf16 waits in shared memory for its turn. One of f32 would take too much of it, and
  // has enough bytes on the way without.
  static constexpr bool kStaged = kAligned && sizeof(T) == 2;
  const T* x;  // element (0, 0) of the panel once in_panel() was called
  int64_t cols;

  __device__ FloatSource in_panel(const Panels&, const Panel& panel) const {
    return {x + panel.begin * cols, cols};
  }
  __device__ void load(const TileSpan& span, Patch<T>& patch) const {
    const int row = patch_row(), count = span.cols - patch_col();
    const T* from = x + (span.row + row) * cols + span.col + patch_col();
#pragma unroll
    for (int i = 0; i < kPatch; ++i, from += cols)
      load_row<kAligned>(from, row + i < span.rows ? count : 0, patch.word[i]);
  }

  // The same in two steps, which no register waits for. Every thread reads back what it staged.
  using Stage = uint4[kPatch][kThreads];
  __device__ void stage(const TileSpan& span, Stage& stage) const {
    const int row = patch_row();
    const T* from = x + (span.row + row) * cols + span.col + patch_col();
#pragma unroll
    for (int i = 0; i < kPatch; ++i, from += cols) {
      const bool inside = row + i < span.rows && patch_col() < span.cols;
      if (inside)
        __pipeline_memcpy_async(&stage[i][threadIdx.x], from, sizeof(uint4));
      else
        stage[i][threadIdx.x] = uint4{};
    }
    __pipeline_commit();
  }
  __device__ static void unstage(const Stage& stage, Patch<T>& patch) {
    __pipeline_wait_prior(0);
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
      const uint4 four = stage[i][threadIdx.x];
      patch.word[i][0] = four.x, patch.word[i][1] = four.y;
      patch.word[i][2] = four.z, patch.word[i][3] = four.w;
    }
  }
};

// The rowwise form, with plain scales.
template <bool kIsAligned>
struct RowwiseSource {
  using Element = e4m3;
  static constexpr bool kAligned = kIsAligned;
  static constexpr bool kStaged = false;
  static constexpr int kCtas = 2;
  static constexpr int64_t kLongestRun = 8;  // it is arithmetic that takes the time here
  const e4m3* qdata;
  const e8m0* scale;
  Block block;
  int row_shift, col_shift;  // log2 of a block's sides
  int64_t cols, scale_stride;

  __device__ RowwiseSource in_panel(const Panels& panels, const Panel& panel) const {
    const Place place = find_place(panels, panel, Form::kRowwise, block, ScaleLayout::kPlain);
    RowwiseSource source = *this;
    source.qdata += place.qdata;
    source.scale += place.scale;
    return source;
  }
  __device__ void load(const TileSpan& span, Patch<e4m3>& patch) const {
    const int row = patch_row(), count = span.cols - patch_col();
    const int64_t first = span.row + row, col = span.col + patch_col();
    const e4m3* from = qdata + first * cols + col;
    // Eight columns are inside one block: those of a rowwise block are 32 or more.
    const e8m0* codes = scale + (col >> col_shift);
#pragma unroll
    for (int i = 0; i < kPatch; ++i, from += cols) {
      const int left = row + i < span.rows ? count : 0;
      load_row<kAligned>(from, left, patch.word[i]);
      patch.code[i] = 0;
      if (left > 0) patch.code[i] = codes[((first + i) >> row_shift) * scale_stride].code;
    }
  }
};

template <bool kAligned>
RowwiseSource<kAligned> rowwise_source(const e4m3* qdata, const e8m0* scale, Block block,
                                       int64_t cols) {
  return {.qdata = qdata,
          .scale = scale,
          .block = block,
          .row_shift = std::countr_zero(static_cast<unsigned>(block.rows)),
          .col_shift = std::countr_zero(static_cast<unsigned>(block.cols)),
          .cols = cols,
          .scale_stride = ceil_div<int64_t>(cols, block.cols)};
}

template <class F>
void with_format(Format format, F&& f) {
  switch (format) {
    case Format::kBf16: return f.template operator()<bf16>();
    case Format::kF32: return f.template operator()<float>();
  }
}

template <class F>
void with_alignment(bool aligned, F&& f) {
  return aligned ? f.template operator()<true>() : f.template operator()<false>();
}

}  // namespace moxie::cuda
