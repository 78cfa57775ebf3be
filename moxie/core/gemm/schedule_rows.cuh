// The order of tiles in forward and dgrad: group by group, within a group in bands of columns whose
// b stays in L2, within a band row by row.
//
// Tiles are handed out in runs: the tiles of a run cost the same. A band of a group has two runs:
// full tiles, then the rest (the shorter tiles at the end of the group; may be none). The
// BucketQueue says which pair takes which tile of a run.
#pragma once

#include "moxie/core/gemm/bucket_queue.cuh"
#include "moxie/core/gemm/warp_walk.cuh"

namespace moxie::sm90 {

// Cost of a tile of `blocks` * 64 rows, in tenths of a full tile's. A warpgroup's step takes 256
// clocks of the tensor cores, 120 of latency and 130 of promotion. One warpgroup is bound by that
// chain (about 500 clocks), two about equally by both (512), three by the tensor cores (768). The
// end of a tile takes 1.75 steps of a full tile, whatever its rows.
template <class Tile>
constexpr __device__ int tile_time(int blocks, int steps) {
  const int of_step = Tile::kConsumers == 2 ? (blocks == 1 ? 9 : 10)
                      : blocks == 1         ? 6
                      : blocks == 2         ? 7
                                            : 10;
  return (4 * of_step * steps + 7 * 10) / (4 * steps + 7);
}

template <class Tile>
class RowsSchedule {
 public:
  using Shared = ScheduleShared<Ragged::kRows>;

  __device__ RowsSchedule(const ScheduleParams& p, Shared&, int cta_in_pair)
      : p_(p),
        cta_in_pair_(cta_in_pair),
        pairs_(static_cast<int>(gridDim.x) / kCluster),
        columns_(ceil_div(p.n, kTileN * kCluster)),
        queue_(pairs_, static_cast<int>(blockIdx.x) / kCluster),
        walk_(p) {
#pragma unroll
    for (int i = 0; i < Tile::kConsumers; ++i) times_[i] = tile_time<Tile>(i + 1, p.k_blocks);
  }

  __device__ Work next() {
    for (;;) {
      while (passed_ == tiles_)
        if (!next_run()) return {};
      const int count = min(tiles_ - passed_, pairs_), position = queue_.take(count, time_);
      passed_ += count;
      if (position >= 0) return tile(passed_ - count + position);
    }
  }

 private:
  // Moves to the next run; false: no group is left.
  __device__ bool next_run() {
    passed_ = tiles_ = 0;
    if (is_full_) {
      is_full_ = false;
    } else {
      is_full_ = true;
      if (!next_band()) return false;
    }
    width_ = min(p_.band, columns_ - band_begin_);
    tiles_ = width_ * (is_full_ ? full_rows_ : rest_rows_);
    time_ = 1;  // of tiles without steps
#pragma unroll
    for (int i = 0; i < Tile::kConsumers; ++i)
      if (walk_.group < p_.groups && blocks() == i + 1) time_ = times_[i];
    return true;
  }

  __device__ bool next_band() {
    band_begin_ += p_.band;
    return band_begin_ < columns_ || next_group();
  }

  // After the last group come the rows that no group covers: zeros are stored there.
  __device__ bool next_group() {
    if (walk_.group == p_.groups) return false;
    walk_.next();
    band_begin_ = 0;
    const int blocks = ceil_div(walk_.end - walk_.begin, kWgmmaM);
    full_rows_ = blocks / Tile::kConsumers;
    rest_blocks_ = blocks % Tile::kConsumers;
    rest_rows_ = rest_blocks_ > 0;
    // Four blocks cost less as 2 + 2 than as 3 + 1.
    if (Tile::kConsumers == 3 && rest_blocks_ == 1 && full_rows_ > 0) {
      --full_rows_;
      rest_rows_ = rest_blocks_ = 2;
    }
    return true;
  }

  // Blocks of 64 rows in a tile of this run.
  __device__ int blocks() const { return is_full_ ? Tile::kConsumers : rest_blocks_; }

  __device__ Work tile(int index) const {
    const int down = index / width_, across = band_begin_ + (index - down * width_);
    const int begin = walk_.begin + (is_full_ ? 0 : full_rows_ * Tile::kM);
    const int height = kWgmmaM * blocks();
    Work work{};
    work.valid = 1;
    work.group = walk_.group;
    work.row = begin + down * height;
    work.col = (across * kCluster + cta_in_pair_) * kTileN;
    work.rows = work.col < p_.n ? min(height, walk_.end - work.row) : 0;
    work.k_blocks = walk_.group < p_.groups ? p_.k_blocks : 0;
    return work;
  }

  const ScheduleParams& p_;
  int cta_in_pair_, pairs_, columns_;
  int times_[Tile::kConsumers];  // costs of tiles with 1, 2, .. blocks
  BucketQueue queue_;
  WarpWalk walk_;
  // The state before the first group: the band is past all columns and its last run is done, so the
  // first call of next_run() moves to the first group.
  static constexpr int kPastAllColumns = 1 << 30;
  int band_begin_ = kPastAllColumns;
  bool is_full_ = false;               // whether the run is full tiles, or the rest
  int full_rows_ = 0, rest_rows_ = 0;  // rows of tiles of the group in each run
  int rest_blocks_ = 0;                // blocks of 64 rows in a tile of the rest
  int width_ = 1, time_ = 0;           // of the run: columns of tiles, cost of a tile
  int tiles_ = 0, passed_ = 0;         // of the run: tiles, and how many are handed out
};

}  // namespace moxie::sm90
