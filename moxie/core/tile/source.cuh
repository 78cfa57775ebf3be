// Sources, from which kernels load fragments: bf16 or f32 in memory, or the rowwise form. Fused ops
// have their own sources (swiglu_source.cuh, gather_source.cuh).
#pragma once

#include <cuda_pipeline_primitives.h>

#include "moxie/core/base/view.h"
#include "moxie/core/tile/fragment.cuh"

namespace moxie::cuda {

// Loads eight elements as packed words; elements from `count` on are 0.
template <bool kAligned, class T, int kWords>
__device__ void load_row(const T* from, int count, uint32_t (&word)[kWords]) {
  constexpr int kPerWord = kFragment / kWords;
  if constexpr (kAligned) {
#pragma unroll
    for (uint32_t& w : word) w = 0;
    if (count <= 0) return;
    if constexpr (kWords == 2) {
      const uint2 two = *reinterpret_cast<const uint2*>(from);
      word[0] = two.x;
      word[1] = two.y;
    } else {
#pragma unroll
      for (int k = 0; k < kWords; k += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(from + k * kPerWord);
        word[k] = four.x;
        word[k + 1] = four.y;
        word[k + 2] = four.z;
        word[k + 3] = four.w;
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
          word[k] |= bits << (j * (32 / kPerWord));
        }
    }
  }
}

// Stores eight elements from packed words; elements from `count` on are not written.
template <bool kAligned, class T, int kWords>
__device__ void store_row(T* to, int count, const uint32_t (&word)[kWords]) {
  constexpr int kPerWord = kFragment / kWords;
  if constexpr (kAligned) {
    if (count <= 0) return;
#pragma unroll
    for (int k = 0; k < kWords; k += 4)
      *reinterpret_cast<uint4*>(to + k * kPerWord) =
          uint4{word[k], word[k + 1], word[k + 2], word[k + 3]};
  } else {
#pragma unroll
    for (int j = 0; j < kFragment; ++j) {
      if (j >= count) break;
      if constexpr (sizeof(T) == 4)
        to[j] = std::bit_cast<float>(word[j]);
      else
        to[j] = {static_cast<uint16_t>(word[j / 2] >> (16 * (j % 2)))};
    }
  }
}

struct Nothing {};

// Copies 8 or 16 bytes per thread from global to shared memory asynchronously, or writes zeros if
// not `inside`; staged_piece() reads them back into registers.
template <class Piece>
__device__ void stage_piece(Piece (&stage)[kThreads], const void* from, bool inside) {
  if (inside)
    __pipeline_memcpy_async(&stage[threadIdx.x], from, sizeof(Piece));
  else
    stage[threadIdx.x] = Piece{};
}
__device__ inline void staged_piece(const uint4 (&stage)[kThreads], uint32_t (&word)[4]) {
  const uint4 four = stage[threadIdx.x];
  word[0] = four.x;
  word[1] = four.y;
  word[2] = four.z;
  word[3] = four.w;
}

// Base of most sources: one tile per load, no shared memory except the stage.
struct OneTile {
  using Shared = Nothing;
  using Held = Nothing;             // registers for the part of the next tile that is not staged
  static constexpr int kParts = 1;  // tiles per load, part_cols() apart
  __device__ static constexpr int64_t part_cols() { return 0; }
  __device__ static void hold(const TileSpan&, Held&) {}
};

// Loads bf16 or f32 from memory. kAligned: every tensor of the op allows accesses of 8 or 16 bytes.
template <class T, bool kIsAligned>
struct FloatSource : OneTile {
  using Element = T;
  static constexpr bool kAligned = kIsAligned;
  static constexpr int kCtas = sizeof(T) == 2 ? 3 : 2;  // per SM: limited by registers
  // In tiles. With longer runs, the CTAs that run at the same time are spread over more rows.
  static constexpr int64_t kLongestRun = 2;
  // Staging prefetches the next tile into shared memory. f32 would take too much of it, and has
  // enough bytes in flight without.
  static constexpr bool kStaged = kAligned && sizeof(T) == 2;
  const T* x;  // element (0, 0) of x; after at_rows(), of the panel
  int64_t cols;

  // Returns this source, positioned at the rows of `at`. All threads must call it, because some
  // sources have a barrier here.
  __device__ FloatSource at_rows(const Panels&, const RowTile& at, Shared&) const {
    FloatSource source = *this;
    source.x += at.panel.begin * cols;
    return source;
  }
  __device__ void load(const TileSpan& span, Fragment<T> (&fragments)[kParts]) const {
    Fragment<T>& fragment = fragments[0];
    const int row = fragment_row(), count = span.cols - fragment_col();
    const T* from = x + (span.row + row) * cols + span.col + fragment_col();
#pragma unroll
    for (int i = 0; i < kFragment; ++i, from += cols)
      load_row<kAligned>(from, row + i < span.rows ? count : 0, fragment.word[i]);
  }

  // stage() and unstage() do what load() does, in two steps with no registers in use between them.
  // Every thread reads back what it staged itself.
  using Stage = uint4[kFragment][kThreads];
  __device__ void stage(const TileSpan& span, Stage& stage) const {
    const int row = fragment_row();
    const T* from = x + (span.row + row) * cols + span.col + fragment_col();
#pragma unroll
    for (int i = 0; i < kFragment; ++i, from += cols)
      stage_piece(stage[i], from, row + i < span.rows && fragment_col() < span.cols);
    __pipeline_commit();
  }
  __device__ static void unstage(const TileSpan&, const Stage& stage, const Held&,
                                 Fragment<T> (&fragments)[kParts]) {
    __pipeline_wait_prior(0);
#pragma unroll
    for (int i = 0; i < kFragment; ++i) staged_piece(stage[i], fragments[0].word[i]);
  }
};

// Loads the rowwise form, which is e4m3 with scales.
template <bool kIsAligned>
struct RowwiseSource : OneTile {
  using Element = e4m3;
  static constexpr bool kAligned = kIsAligned;
  static constexpr bool kStaged = false;
  static constexpr int kCtas = 2;
  static constexpr int64_t kLongestRun =
      8;  // arithmetic limits its kernels, so the order in memory matters less
  const e4m3* qdata;
  const e8m0* scale;
  Block block;
  ScaleLayout layout;
  int row_shift, col_shift;    // log2 of a block's sides
  int64_t cols, scale_stride;  // scale_stride: as in Place
  int64_t row_step;            // bytes from an even row's scale to that of the next row
  int64_t tile_step;  // bytes from one tile's scales to the next tile's; quads: per 4 tiles
  int quad_shift;     // quads: log2(4), as a tile uses one byte of a quad; else 0

  __device__ RowwiseSource at_rows(const Panels& panels, const RowTile& at, Shared&) const {
    const Place place = place_of(panels, at.panel, Form::kRowwise, block, layout);
    RowwiseSource source = *this;
    // Moves qdata and scale to this thread's fragment in the first tile of columns.
    source.qdata += place.qdata + (at.row + fragment_row()) * cols + fragment_col();
    const int64_t row = at.row + code_row();
    source.scale += place.scale;
    if (layout == ScaleLayout::kPlain)
      source.scale += (row >> row_shift) * scale_stride + (fragment_col() >> col_shift);
    else if (layout == ScaleLayout::kQuads)
      source.scale += (row >> row_shift) * kQuad;
    else
      source.scale += swizzled_index(row, fragment_col() / kMxBlock, scale_stride);
    return source;
  }
  __device__ void load(const TileSpan& span, Fragment<e4m3> (&fragments)[kParts]) const {
    const e4m3* from = qdata + span.col;
#pragma unroll
    for (int i = 0; i < kFragment; ++i, from += cols)
      load_row<kAligned>(from, fragment_row() + i < span.rows ? span.cols - fragment_col() : 0,
                         fragments[0].word[i]);
    load_codes(span, fragments[0].loaded);
  }

 private:
  // Four neighbouring lanes share a block, as rowwise blocks have 32 or more columns. Each lane
  // loads the codes of two rows, the first of them even, so a block taller than one row contains
  // both.
  __device__ static int code_row() { return fragment_row() + lane_index() % 4 * 2; }
  __device__ void load_codes(const TileSpan& span, uint8_t (&codes)[2]) const {
    const auto tile = static_cast<uint32_t>(span.col / kTileCols);
    const e8m0* from = scale + (tile >> quad_shift) * tile_step + (tile & ((1u << quad_shift) - 1));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      codes[i] = 0;
      if (code_row() + i < span.rows && fragment_col() / kMxBlock * kMxBlock < span.cols)
        codes[i] = from[i * row_step].code;
    }
  }
};

template <bool kAligned>
RowwiseSource<kAligned> rowwise_source(const e4m3* qdata, const e8m0* scale, Block block,
                                       ScaleLayout layout, const Panels& panels) {
  RowwiseSource<kAligned> source{};
  source.qdata = qdata;
  source.scale = scale;
  source.block = block;
  source.layout = layout;
  source.row_shift = std::countr_zero(static_cast<unsigned>(block.rows));
  source.col_shift = std::countr_zero(static_cast<unsigned>(block.cols));
  source.cols = panels.cols;
  Panel any = first_panel();  // all panels have the same stride
  any.rows = panels.rows;
  source.scale_stride = place_of(panels, any, Form::kRowwise, block, layout).scale_stride;
  switch (layout) {
    case ScaleLayout::kPlain:
      source.row_step = block.rows == 1 ? source.scale_stride : 0;
      source.tile_step = kTileCols / block.cols;
      break;
    case ScaleLayout::kSwizzled:
      source.row_step = swizzled_index(1, 0, 1);
      source.tile_step = kScaleTileBytes;
      break;
    case ScaleLayout::kQuads:
      source.row_step = block.rows == 1 ? kQuad : 0;
      source.tile_step = source.scale_stride;
      source.quad_shift = std::countr_zero(static_cast<unsigned>(kQuad));
      break;
  }
  return source;
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
