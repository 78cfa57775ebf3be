// The Hopper GEMM: its shared memory and its kernel parameters. docs/kernels/grouped_gemm.md has
// the reasons and the measurements.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "moxie/core/base/math.h"
#include "moxie/core/base/view.h"
#include "moxie/core/gemm/grouped_wgrad.h"
#include "moxie/core/gemm/work.h"

namespace moxie::sm90 {

inline constexpr int kMaxShared = 227 << 10;  // shared memory of one CTA on sm_90

// Staging buffer of one TMA store: 16 rows of one warp, 64 bf16 columns.
struct StoreBox {
  static constexpr int kRows = 16, kBytes = 128;
  alignas(1024) uint8_t bytes[kRows * kBytes];
};

// Scales of b for one step, if a tile spans more than one scale of b.
template <int kSpans>
struct SpanScales {
  alignas(16) uint32_t spans[kSpans];
};
template <>
struct SpanScales<1> {};

// The scales of one step, stored as f32 exponent fields.
template <class Tile>
struct StepScales : SpanScales<Tile::kSpans> {
  // Row r in the low 16 bits, row r + 8 in the high 16 bits: the two rows that one wgmma thread
  // holds (struct Rows). With one scale of b per tile this is the product of both scales; with
  // more, the exponents in `spans` are added to it.
  uint32_t pairs[Tile::kM / 2];
  // Per scale warp: nonzero if any scale of the current four steps is wild (scale_codes.cuh);
  // `pairs` and `spans` are then undefined.
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
  uint64_t full[Tile::kStages];   // TMA, scale warps -> consumers: operands and scales are there
  uint64_t empty[Tile::kStages];  // consumers of both CTAs -> TMA, scale warps: may be overwritten
  Work work[kWorks];
  uint64_t work_full[kWorks];   // scheduler -> all others
  uint64_t work_empty[kWorks];  // all others -> scheduler
  ScheduleShared<Tile::kRagged> schedule;
};

template <class Tile, int kRows>
inline constexpr bool kFits = Tile::kM == kRows && sizeof(GemmShared<Tile>) <= kMaxShared;
static_assert(kFits<TallTile<Ragged::kRows>, kTallRows>);
static_assert(kFits<TallTile<Ragged::kDepth>, kTallRows>);
static_assert(kFits<FlatTile<Ragged::kRows>, kFlatRows>);
static_assert(kFits<FlatTile<Ragged::kDepth>, kFlatRows>);

// Scales in quads: one word holds a row's codes of four steps, and the words of neighbouring rows
// are adjacent. A word covers at least 16 bytes of the operand, so 32-bit indices suffice.
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

// The maps of a tile's last step (end_maps.cuh).
struct alignas(kWgradWorkspaceAlignment) EndMaps {
  CUtensorMap a, b;
};
static_assert(kMaxPairs * kCluster * kWorks * sizeof(EndMaps) == kWgradWorkspace);

struct GemmParams : ScheduleParams {
  CUtensorMap a, b;
  CUtensorMap out_map;  // bf16
  ScaleMatrix scale_a, scale_b;
  void* out;
  const void* bias;  // or nullptr
  Format bias_format;
  int bias_stride;      // elements from one group's bias to the next; 0: all groups share one
  int b_rows_of_group;  // kRows: rows of b per group; kDepth: 0, b is shared by all
  EndMaps* end_maps;    // kDepth: [CTAs, kWorks]; nullptr if the padding holds zeros
  int throttle;         // kDepth: index of the counter (throttle.cuh), set at launch
  bool add;             // kDepth: out += instead of =
};

}  // namespace moxie::sm90
