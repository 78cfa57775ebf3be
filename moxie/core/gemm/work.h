// The unit of work (one tile of the result) and the inputs of the schedules. Neither this header
// nor the schedules include CUDA headers, so tests run them on a CPU.
#pragma once

#include <cstdint>

#include "moxie/core/gemm/choose_tile.h"

namespace moxie::sm90 {

inline constexpr int kTileN = 128;
inline constexpr int kTileK = 128;    // elements with one scale of a, and the width of the swizzle
inline constexpr int kWgmmaM = 64;    // rows of one wgmma
inline constexpr int kWgmmaK = 32;    // depth of one wgmma
inline constexpr int kCluster = 2;    // CTAs side by side in n; each loads half of their shared a
inline constexpr int kMaxPairs = 72;  // CTA pairs in flight: a full GH100 has 144 SMs

// kConsumers: warpgroups of 64 rows each; while one promotes, the others multiply. A thread holds
// 64 f32 sums and 64 f32 of the product that is not promoted yet.
template <Ragged kRaggedOf, int kConsumersOf>
struct GemmTile {
  static constexpr Ragged kRagged = kRaggedOf;
  static constexpr int kConsumers = kConsumersOf;
  static constexpr int kConsumerWarps = 4 * kConsumers;
  static constexpr int kScaleWarps = 2;  // warps that load scales (scale_warp.cuh)
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kM = kWgmmaM * kConsumers;
  static constexpr int kSpan = kRagged == Ragged::kRows ? 128 : 32;  // columns with one scale of b
  static constexpr int kSpans = kTileN / kSpan;
  // 5 stages of 40 KB or 6 of 32 KB. The 227 KB of a CTA (kFits, gemm_params.cuh) then have room
  // for one or two StoreBoxes per consumer warp (24 or 32 KB), scales and barriers.
  static constexpr int kStages = (200 << 10) / ((kM + kTileN) * kTileK);
  static constexpr int kBoxes = kConsumers == 2 ? 2 : 1;
  // Registers per thread after setmaxnreg. Their sum must not exceed what the CTA starts with (168
  // per thread for two consumers, 128 for three), or setmaxnreg_inc would never return.
  static constexpr int kRegisters = kConsumers == 2 ? 216 : 152;
  static constexpr int kOtherRegisters = kConsumers == 2 ? 72 : 56;
  static_assert(kConsumers * kRegisters + kOtherRegisters <=
                (kConsumers + 1) * (65536 / kThreads / 8 * 8));
};

// Three warpgroups keep the tensor cores busy; two are for groups of few rows.
template <Ragged kRagged>
using TallTile = GemmTile<kRagged, 3>;
template <Ragged kRagged>
using FlatTile = GemmTile<kRagged, 2>;

// One tile of the result. The CTAs of a cluster differ only in `col` (rows = 0 if col >= n).
struct alignas(16) Work {
  int group;
  int row, rows;  // first row in a, and the number of rows; rows = 0: nothing to compute or store
  int col;
  int k_begin, k_blocks;  // in blocks of 128; k_blocks = 0: the product is 0
  int valid;              // 0: no tile is left
};

// The part of the problem that a schedule needs.
struct ScheduleParams {
  const int32_t* offs;  // [G] or nullptr
  int groups, rows;
  int m;         // wgrad: rows of the result per group
  int n;         // columns of the result
  int k_blocks;  // forward, dgrad: blocks of 128 along k
  int band;      // choose_tile.h
};

// A schedule's shared memory.
template <Ragged kRagged>
struct ScheduleShared {};

template <>
struct ScheduleShared<Ragged::kDepth> {
  uint32_t queue[kMaxPairs];  // tile_queue.cuh
  // Up to this many groups are sorted by depth. Shared memory has no room for more, and with many
  // groups each is a small part of the work, so more groups run in their own order.
  static constexpr int kSorted = 64;
  int32_t begin[kSorted + 1];  // first block of 128 of each group
  uint8_t order[kSorted];      // groups, deepest first
};

}  // namespace moxie::sm90
