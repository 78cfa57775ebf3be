// The shape of the Hopper GEMM: what a CTA computes, what its shared memory holds, and what the
// kernel receives. docs/kernels/grouped_gemm.md has the reasons and the measurements.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "moxie/core/base/math.h"
#include "moxie/core/base/view.h"
#include "moxie/core/gemm/choose_tile.h"
#include "moxie/core/gemm/operand.h"
#include "moxie/core/layout/check.h"

namespace moxie::sm90 {

inline constexpr int kTileN = 128;
inline constexpr int kTileK = 128;    // one scale of a; also the width of the smem swizzle
inline constexpr int kWgmmaM = 64;    // rows of one instruction
inline constexpr int kWgmmaK = 32;    // and its depth
inline constexpr int kCluster = 2;    // CTAs side by side in n, each loading half of their common a
inline constexpr int kMaxPairs = 72;  // of CTAs at a time: a whole GH100 has 144 multiprocessors
inline constexpr int kMaxShared = 227 << 10;

// kConsumers: warpgroups of 64 rows each; while one promotes, others multiply. 64 f32 per thread
// hold its sums, and 64 the product that is not promoted yet.
template <Ragged kRaggedOf, int kConsumersOf>
struct GemmTile {
  static constexpr Ragged kRagged = kRaggedOf;
  static constexpr int kConsumers = kConsumersOf;
  static constexpr int kConsumerWarps = 4 * kConsumers;
  static constexpr int kScalers = 2;  // warps that find scales
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kM = kWgmmaM * kConsumers;
  static constexpr int kSpan = kRagged == Ragged::kRows ? 128 : 32;  // columns with one scale of b
  static constexpr int kSpans = kTileN / kSpan;
  // As many stages as there is room for, and boxes (of a warp, StoreBox) in what is left.
  static constexpr int kStages = (200 << 10) / ((kM + kTileN) * kTileK);
  static constexpr int kBoxes = kConsumers == 2 ? 2 : 1;
  // Of a consumer, and of the other warps. Together no more than the CTA begins with (168 and 128
  // a thread), or the consumers would wait for them for ever.
  static constexpr int kRegisters = kConsumers == 2 ? 216 : 152;
  static constexpr int kOtherRegisters = kConsumers == 2 ? 72 : 56;
  static_assert(kConsumers * kRegisters + kOtherRegisters <=
                (kConsumers + 1) * (65536 / kThreads / 8 * 8));
};

// Three warpgroups leave the pipe no gap; two are for groups of few rows.
template <Ragged kRagged>
using TallTile = GemmTile<kRagged, 3>;
template <Ragged kRagged>
using FlatTile = GemmTile<kRagged, 2>;

// One tile of the result. Both CTAs of a pair have the same but for col, and rows past the last
// column.
struct alignas(16) Work {
  int group;
  int row, rows;  // first row in a, and how many there are; 0: nothing to compute or store
  int col;
  int k_begin, k_blocks;  // in blocks of 128; 0: the product is 0
  int valid;              // 0: no tile is left
};

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
// whether one of the scales of these four steps, in either half of the rows, is wild (scales.cuh);
// the others are then anything.
template <class Tile>
struct StepScales : SpanScales<Tile::kSpans> {
  uint32_t pairs[Tile::kM / 2];
  alignas(4) uint16_t wild[Tile::kScalers];
};

template <class Tile>
struct PipelineShared {
  struct Stage {
    alignas(1024) uint8_t a[Tile::kM * kTileK];  // 1024: the swizzle repeats every 8 rows
    alignas(1024) uint8_t b[kTileN * kTileK];
  } stage[Tile::kStages];
  StoreBox out[Tile::kConsumerWarps][Tile::kBoxes];
  StepScales<Tile> scales[Tile::kStages];
  uint64_t full[Tile::kStages];   // copy engine, scalers -> consumers: all is there
  uint64_t empty[Tile::kStages];  // consumers of both CTAs -> those: may be overwritten
  static constexpr int kWorks = 4;
  Work work[kWorks];
  uint64_t work_full[kWorks];   // scheduler -> all others
  uint64_t work_empty[kWorks];  // and back
  uint32_t turns[kMaxPairs];    // turns.cuh
};

template <class Tile, Ragged kRagged = Tile::kRagged>
struct GemmShared : PipelineShared<Tile> {};

template <class Tile>
struct GemmShared<Tile, Ragged::kDepth> : PipelineShared<Tile> {
  // Where the groups begin, in blocks of 128, and their order, deepest first. There is no room for
  // more, and of many groups each is likely to be a small part; those are taken as they come.
  static constexpr int kSorted = 64;
  int32_t begin[kSorted + 1];
  uint8_t order[kSorted];
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

struct GemmParams {
  CUtensorMap a, b;
  CUtensorMap out_map;  // bf16
  ScaleMatrix scale_a, scale_b;
  const int32_t* offs;  // [G] or nullptr
  void* out;
  const void* bias;  // or nullptr
  Format bias_format;
  int bias_stride;  // from one group's to the next; 0: one for all
  int groups, rows;
  int m;                // kDepth: rows of the result per group
  int n;                // columns of the result
  int k_blocks;         // kRows: along k
  int b_rows_of_group;  // kRows: rows of b per group; kDepth: 0, b is shared by all
  int band;             // choose_tile.h
  int pace;             // kDepth: which counter (pace.cuh); the launch sets it
  bool add;             // kDepth: out += instead of =
};

}  // namespace moxie::sm90
