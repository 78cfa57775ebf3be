// One form (rowwise or colwise) of a quantizer's result on the device: where tiles and scales go.
#pragma once

#include "moxie/core/layout/check_args.h"
#include "moxie/core/tile/store.cuh"
#include "moxie/core/tile/zero.cuh"

namespace moxie::cuda {

inline constexpr int kMxShift = 5;  // log2 of a block of 32
static_assert(1 << kMxShift == kMxBlock);

template <Form kForm>
struct FormParams {
  Block block{};
  ScaleLayout layout = ScaleLayout::kPlain;
  int outer_shift = 0, k_shift = 0;  // log2 of a block's sides
  e4m3* qdata = nullptr;
  e8m0* scale = nullptr;
  int64_t scale_bytes = 0;
};

template <Form kForm>
FormParams<kForm> form_params(const std::optional<QuantizedOut>& out) {
  if (!out) return {};
  return {.block = out->block,
          .layout = out->layout,
          .outer_shift = std::countr_zero(static_cast<unsigned>(outer_of(out->block, kForm))),
          .k_shift = std::countr_zero(static_cast<unsigned>(k_of(out->block, kForm))),
          .qdata = out->qdata.data,
          .scale = out->scale.data,
          .scale_bytes = numel(out->scale.shape)};
}

// Where a tile writes its part of the form. The part of a tail tile is rows that no group covers.
template <Form kForm>
__device__ TileOut tile_out(const FormParams<kForm>& form, const Place& place, const RowTile& at,
                            const Panels& panels, int64_t col) {
  constexpr bool kRowwise = kForm == Form::kRowwise;
  const int64_t rows = !at.tail   ? (kRowwise ? at.panel.rows : place.k)
                       : kRowwise ? panels.rows - at.panel.begin
                                  : place.qdata_stride - at.panel.padded;
  const int tile_rows = clip(rows - at.row, kTileRows),
            tile_cols = clip(panels.cols - col, kTileCols);
  const int64_t outer = kRowwise ? at.row : col, k = kRowwise ? col : at.row;
  return {.qdata = form.qdata + place.qdata + outer * place.qdata_stride + k,
          .stride = place.qdata_stride,
          .outer = kRowwise ? tile_rows : tile_cols,
          .k = kRowwise ? tile_cols : tile_rows};
}

// Stores up to four scales; the first is in the lowest byte.
__device__ inline void store_codes(e8m0* to, uint32_t codes, int count) {
  if (count == 4 && reinterpret_cast<uintptr_t>(to) % 4 == 0) {
    *reinterpret_cast<uint32_t*>(to) = codes;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (i < count) to[i] = {static_cast<uint8_t>(codes >> (8 * i))};
}

// The line of the tile whose scales are stored by thread `thread` of kTileRows. For swizzled
// scales, threads are reordered so that neighbours store neighbouring words (L2 works in 32-byte
// sectors).
template <Form kForm>
__device__ int scale_line(const FormParams<kForm>& form, int thread) {
  constexpr int kBands = 4, kBand = kScaleTileRows / kBands;
  return form.layout == ScaleLayout::kSwizzled ? thread % kBands * kBand + thread / kBands : thread;
}

// Stores the scales of a tile whose first element is (outer, k) of the panel.
template <Form kForm>
struct TileScales {
  const FormParams<kForm>& form;
  const Place& place;
  int64_t outer, k;

  // Stores the scales of one line. `codes` has one byte per 32 elements along k; larger blocks
  // repeat theirs. What is stored depends on the layout:
  //   plain     the first line of each block stores the block's scale
  //   quads     likewise; a tile has one byte of a quad, and the last tile along k also writes the
  //             padding of the last quad
  //   swizzled  a tile is exactly one tile of swizzled scales, written whole with its padding
  __device__ void store(const TileOut& out, int line, uint32_t codes) const {
    static_assert(sides_are<1, 32, 128>());
    const int inside = line < out.outer ? (out.k + kMxBlock - 1) / kMxBlock : 0;
    if (form.layout == ScaleLayout::kSwizzled) {
      const int64_t at =
          swizzled_index(outer, k / kMxBlock, place.scale_stride) + swizzled_index(line, 0, 1);
      store_codes(form.scale + place.scale + at,
                  inside == 4 ? codes : codes & ((1u << (8 * inside)) - 1), 4);
    } else if (inside > 0 && begins_block(line)) {
      e8m0* const to = of(line);
      if (form.layout == ScaleLayout::kPlain) {
        store_codes(to, codes, form.k_shift == kMxShift ? inside : 1);
      } else {
        ptx::store_kept(to, static_cast<uint8_t>(codes));  // a quarter of a quad
        const int64_t block = place.first_block + (k >> form.k_shift);
        if (block + 1 == place.num_blocks)
          for (int i = 1; i < kQuad - block % kQuad; ++i) to[i] = {};
      }
    }
  }

  // The first scale of a line (plain and quads only).
  __device__ e8m0* of(int line) const {
    return form.scale +
           scale_index(place, form.layout, (outer + line) >> form.outer_shift, k >> form.k_shift);
  }
  __device__ bool begins_block(int line) const { return !(line & ((1 << form.outer_shift) - 1)); }
};

// Stores the scales of all columns of a tile of the colwise form. The four plain scales of a column
// are stored by four lanes, which is one memory access even if they are not aligned.
__device__ inline void store_column_scales(const TileScales<Form::kColwise>& scales,
                                           const TileOut& out,
                                           const uint8_t (&code)[kMaxRowBlocks][kTileCols]) {
  const auto& form = scales.form;
  if (form.layout == ScaleLayout::kPlain && form.k_shift == kMxShift) {
    constexpr int kLines = kThreads / kMaxRowBlocks;
    const int block = threadIdx.x % kMaxRowBlocks, line = threadIdx.x / kMaxRowBlocks;
    e8m0* to = scales.of(line) + block;
#pragma unroll
    for (int i = 0; i < kTileCols; i += kLines) {
      const int at = line + i;
      if (at < out.outer && block * kMxBlock < out.k && scales.begins_block(at))
        ptx::store_kept(to, code[block][at]);  // an eighth of a sector
      to += (kLines >> form.outer_shift) * scales.place.scale_stride;
    }
  } else if (threadIdx.x < kTileCols) {
    const int line = scale_line(form, static_cast<int>(threadIdx.x));
    scales.store(out, line,
                 code[0][line] | code[1][line] << 8 | code[2][line] << 16 |
                     static_cast<uint32_t>(code[3][line]) << 24);
  }
}

// Zeroes the elements past the last group, and their plain scales or quads. For swizzled scales
// zero_swizzled() does it: they are one range of bytes, split evenly over the CTAs of the tail.
template <bool kAligned, Form kForm>
__device__ void zero_tail(const FormParams<kForm>& form, const Place& place, const RowTile& at,
                          const Panels& panels, int64_t col, int64_t step) {
  constexpr bool kRowwise = kForm == Form::kRowwise;
#pragma unroll 1
  for (; col < panels.cols; col += step) {
    const TileOut out = tile_out(form, place, at, panels, col);
    zero<kAligned, std::conditional_t<kRowwise, uint2, uint4>>(out);
    if (const int line = threadIdx.x;
        form.layout != ScaleLayout::kSwizzled && line < kTileRows && line < out.outer)
      TileScales<kForm>{form, place, kRowwise ? at.row : col, kRowwise ? col : at.row}.store(
          out, line, 0);
  }
}

template <Form kForm>
__device__ void zero_swizzled(const FormParams<kForm>& form, const Place& place, int64_t index,
                              int64_t count) {
  if (form.layout == ScaleLayout::kSwizzled)
    zero_share(form.scale + place.scale, form.scale_bytes - place.scale, index, count);
}

}  // namespace moxie::cuda
