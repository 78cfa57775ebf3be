// A tile of the result, and what the schedules that hand tiles out need to know. Nothing here or in
// the schedules needs a header of the toolkit: tests run them on a CPU.
#pragma once

#include <cstdint>

#include "moxie/core/gemm/choose_tile.h"
#include "moxie/core/gemm/grouped_wgrad.h"

namespace moxie::sm90 {

inline constexpr int kTileN = 128;
inline constexpr int kTileK = 128;    // one scale of a; also the width of the smem swizzle
inline constexpr int kWgmmaM = 64;    // rows of one instruction
inline constexpr int kWgmmaK = 32;    // and its depth
inline constexpr int kCluster = 2;    // CTAs side by side in n, each loading half of their common a
inline constexpr int kMaxPairs = 72;  // of CTAs at a time: a whole GH100 has 144 multiprocessors

// kConsumers: warpgroups of 64 rows each; while one promotes, others multiply. 64 f32 per thread
// hold its sums, and 64 the product that is not promoted yet. kPadding: of the operands. What has
// to be cleared gets a kernel of its own, so that clean padding costs nothing.
template <Ragged kRaggedOf, int kConsumersOf, Padding kPadding>
struct GemmTile {
  static constexpr bool kClears = kPadding == Padding::kAnything;
  static constexpr Ragged kRagged = kRaggedOf;
  static constexpr int kConsumers = kConsumersOf;
  static constexpr int kConsumerWarps = 4 * kConsumers;
  static constexpr int kScaleWarps = 2;  // warps that find scales
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
template <Ragged kRagged, Padding kPadding = Padding::kZeros>
using TallTile = GemmTile<kRagged, 3, kPadding>;
template <Ragged kRagged, Padding kPadding = Padding::kZeros>
using FlatTile = GemmTile<kRagged, 2, kPadding>;

// One tile of the result. Both CTAs of a pair have the same but for col, and rows past the last
// column.
struct alignas(16) Work {
  int group;
  int row, rows;  // first row in a, and how many there are; 0: nothing to compute or store
  int col;
  int k_begin, k_blocks;  // in blocks of 128; 0: the product is 0
  int valid;              // 0: no tile is left
};

// What a schedule needs of the problem.
struct ScheduleParams {
  const int32_t* offs;  // [G] or nullptr
  int groups, rows;
  int m;         // kDepth: rows of the result per group
  int n;         // columns of the result
  int k_blocks;  // kRows: along k
  int band;      // choose_tile.h
};

// What it keeps in shared memory.
template <Ragged kRagged>
struct ScheduleShared {
  uint32_t queue[kMaxPairs];  // tile_queue.cuh
};

template <>
struct ScheduleShared<Ragged::kDepth> {
  uint32_t queue[kMaxPairs];
  // Where the groups begin, in blocks of 128, and their order, deepest first. There is no room for
  // more, and of many groups each is likely to be a small part; those are taken as they come.
  static constexpr int kSorted = 64;
  int32_t begin[kSorted + 1];
  uint8_t order[kSorted];
};

}  // namespace moxie::sm90
