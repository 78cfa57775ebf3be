// The shape of the Hopper GEMM: what a CTA computes, what its shared memory holds, and what the
// kernel receives. docs/kernels/grouped_gemm.md has the reasons and the measurements.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "moxie/core/base/math.h"
#include "moxie/core/base/view.h"
#include "moxie/core/layout/check.h"

namespace moxie::sm90 {

// Which size is ragged: m in forward and dgrad, k in wgrad; n never is.
enum class Ragged : uint8_t { kRows, kDepth };

inline constexpr int kTileN = 128;
inline constexpr int kTileK = 128;    // one scale of a; also the width of the smem swizzle
inline constexpr int kWgmmaM = 64;    // rows of one instruction
inline constexpr int kWgmmaK = 32;    // and its depth
inline constexpr int kConsumers = 2;  // warpgroups: while one promotes, the other multiplies
inline constexpr int kConsumerWarps = 4 * kConsumers;
inline constexpr int kCluster = 2;  // CTAs side by side in n, each loading half of their common a
inline constexpr int kGemmThreads = 128 * (kConsumers + 1);
inline constexpr int kMaxShared = 227 << 10;

// kWaves: how many times 64 rows a consumer holds. Two are all that registers have room for: 64
// f32 per wave and thread, and 64 for the product that is not promoted yet.
template <int kWavesOf>
struct GemmTile {
  static constexpr int kWaves = kWavesOf;
  static constexpr int kM = kWgmmaM * kConsumers * kWaves;
  static constexpr int kStages = kWaves == 2 ? 4 : 6;  // as many as shared memory has room for
};

// One tile of the result. Both CTAs of a pair have the same but for col.
struct alignas(16) Work {
  int group;
  int row, rows;  // first row in a, and how many there are; 0: nothing to compute or store
  int col;
  int k_begin, k_blocks;  // in blocks of 128; 0: the result is 0
  int valid;              // 0: no tile is left
};

// What one warp writes of one wave before the copy engine takes it: bf16, two boxes of 64 columns.
struct StoreBox {
  static constexpr int kRows = 16, kBytes = 128;
  alignas(1024) uint8_t half[2][kRows * kBytes];
};

template <class Tile>
struct GemmShared {
  struct Stage {
    alignas(1024) uint8_t a[Tile::kM * kTileK];  // 1024: the swizzle repeats every 8 rows
    alignas(1024) uint8_t b[kTileN * kTileK];
  } stage[Tile::kStages];
  StoreBox out[kConsumerWarps];
  uint64_t full[Tile::kStages];   // copy engine -> consumers: the bytes have landed
  uint64_t empty[Tile::kStages];  // consumers of both CTAs -> producer: may be overwritten
  static constexpr int kWorks = 4;
  Work work[kWorks];
  uint64_t work_full[kWorks];   // scheduler -> producer and consumers
  uint64_t work_empty[kWorks];  // and back
  // wgrad: where the groups begin, in blocks of 128, and their order, deepest first. With more
  // groups than this each is a small part of the whole and they are taken as they come.
  static constexpr int kSorted = 256;
  int32_t begin[kSorted + 1];
  uint16_t order[kSorted];
};
static_assert(sizeof(GemmShared<GemmTile<2>>) <= kMaxShared);
static_assert(sizeof(GemmShared<GemmTile<1>>) <= kMaxShared);

// Plain scales: rows of codes along k.
struct ScaleMatrix {
  ScaleMatrix() = default;
  ScaleMatrix(const uint8_t* data, int64_t rows, int64_t stride)
      : data(data), end(data + rows * stride), rows(rows), stride(stride) {}

  const uint8_t *data, *end;
  int64_t rows, stride;  // stride: codes per row
};

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
  int m;                  // kDepth: rows of the result per group
  int n;                  // columns of the result
  int k_blocks;           // kRows: along k
  int b_rows_of_group;    // kRows: rows of b per group; kDepth: 0, b is shared by all
  int b_scales_of_group;  // the same for scale_b
  int band;               // choose_tile.h
  bool add;               // kDepth: out += instead of =
};

}  // namespace moxie::sm90
