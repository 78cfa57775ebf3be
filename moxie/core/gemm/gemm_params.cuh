// The Hopper GEMM: what its shared memory holds, and what the kernel receives.
// docs/kernels/grouped_gemm.md has the reasons and the measurements.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "moxie/core/base/math.h"
#include "moxie/core/base/view.h"
#include "moxie/core/gemm/operand.h"
#include "moxie/core/gemm/work.h"

namespace moxie::sm90 {

inline constexpr int kMaxShared = 227 << 10;

// What one warp writes before the copy engine takes it: 64 columns in bf16.
struct StoreBox {
  static constexpr int kRows = 16, kBytes = 128;
  alignas(1024) uint8_t bytes[kRows * kBytes];
};

// Factors that b's scales have, where a tile meets more than one.
template <int kSpans>
struct SpanScales {
  alignas(16) uint32_t spans[kSpans];
};
template <>
struct SpanScales<1> {};

// The scales of one step, as bits that f32 have for an exponent. A word has those of two rows, in
// 16 bits each: of row r and, above, of row r + 8, which are what a thread of wgmma holds (Rows).
// If there is one scale of b they are products with it, else b's, to be added, are in spans. wild:
// whether one of the scales of these four steps, in either half of the rows, is wild
// (scale_codes.cuh); the others are then anything.
template <class Tile>
struct StepScales : SpanScales<Tile::kSpans> {
  uint32_t pairs[Tile::kM / 2];
  alignas(4) uint16_t wild[Tile::kScaleWarps];
};

template <class Tile>
struct GemmShared {
  struct Stage {
    alignas(1024) uint8_t a[Tile::kM * kTileK];  // 1024: the swizzle repeats every 8 rows
    alignas(1024) uint8_t b[kTileN * kTileK];
  } stage[Tile::kStages];
  StoreBox out[Tile::kConsumerWarps][Tile::kBoxes];
  StepScales<Tile> scales[Tile::kStages];
  uint64_t full[Tile::kStages];   // copy engine, scale warps -> consumers: all is there
  uint64_t empty[Tile::kStages];  // consumers of both CTAs -> those: may be overwritten
  static constexpr int kWorks = 4;
  Work work[kWorks];
  uint64_t work_full[kWorks];   // scheduler -> all others
  uint64_t work_empty[kWorks];  // and back
  ScheduleShared<Tile::kRagged> schedule;
  uint64_t loaded[Tile::kStages];  // Padding::kAnything: copy engine -> scalers, before full
};

template <class Tile, int kRows>
inline constexpr bool kFits = Tile::kM == kRows && sizeof(GemmShared<Tile>) <= kMaxShared;
static_assert(kFits<TallTile<Ragged::kRows>, kTallRows>);
static_assert(kFits<TallTile<Ragged::kDepth>, kTallRows>);
static_assert(kFits<FlatTile<Ragged::kRows>, kFlatRows>);
static_assert(kFits<FlatTile<Ragged::kDepth>, kFlatRows>);

// Scales in quads: the codes of four steps of a row are a word, and rows lie side by side. There
// is a word for 16 bytes of the operand at least: 32 bits count them all.
struct ScaleMatrix {
  const uint32_t* words;  // [matrices, quads, rows]
  uint32_t rows, quads;
};

inline ScaleMatrix quads_of(const GemmOperand& operand) {
  const int64_t rows = ceil_div<int64_t>(operand.qdata.dim(-2), operand.outer_block);
  return {.words = reinterpret_cast<const uint32_t*>(operand.scale.data),
          .rows = static_cast<uint32_t>(rows),
          .quads = static_cast<uint32_t>(operand.scale.dim(-2) / rows)};
}

struct GemmParams : ScheduleParams {
  CUtensorMap a, b;
  CUtensorMap out_map;  // bf16
  ScaleMatrix scale_a, scale_b;
  void* out;
  const void* bias;  // or nullptr
  Format bias_format;
  int bias_stride;      // from one group's to the next; 0: one for all
  int b_rows_of_group;  // kRows: rows of b per group; kDepth: 0, b is shared by all
  int throttle;         // kDepth: which counter (throttle.cuh); the launch sets it
  bool add;             // kDepth: out += instead of =
};

}  // namespace moxie::sm90
