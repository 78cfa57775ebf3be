// The order of tiles in forward and dgrad: group after group, in bands of columns that stay in
// cache, and in a band row after row.
#pragma once

#include "moxie/core/gemm/tile_queue.cuh"
#include "moxie/core/gemm/warp_walk.cuh"

namespace moxie::sm90 {

template <class Tile>
class RowsSchedule {
 public:
  using Shared = ScheduleShared<Ragged::kRows>;

  __device__ RowsSchedule(const ScheduleParams& p, Shared& shared, int cta_in_pair)
      : p_(p),
        cta_in_pair_(cta_in_pair),
        me_(static_cast<int>(blockIdx.x) / kCluster),
        pairs_(static_cast<int>(gridDim.x) / kCluster),
        columns_(ceil_div(p.n, kTileN * kCluster)),
        queue_(shared.queue, pairs_),
        walk_(p) {}

  __device__ Work next() {
    for (;;) {
      while (passed_ == tiles_)
        if (!next_run()) return {};
      const int count = min(tiles_ - passed_, pairs_), before = queue_.before(me_);
      queue_.pass(count, time_);
      passed_ += count;
      if (before < count) return tile(passed_ - count + before);
    }
  }

 private:
  // The next tiles that take equally long: in each band of a group the full ones, then the others.
  __device__ bool next_run() {
    passed_ = tiles_ = 0;
    if (is_full_) {
      is_full_ = false;
    } else {
      is_full_ = true;
      band_begin_ += p_.band;
      if (band_begin_ >= columns_ && !next_group()) return false;
    }
    width_ = min(p_.band, columns_ - band_begin_);
    tiles_ = width_ * (is_full_ ? full_ : others_);
    time_ =
        walk_.group == p_.groups ? 1 : step_time<Tile>(is_full_ ? Tile::kConsumers : other_blocks_);
    return true;
  }

  // After the last group, the rows that no group covers: zeros are stored there.
  __device__ bool next_group() {
    if (walk_.group == p_.groups) return false;
    walk_.next();
    band_begin_ = 0;
    const int blocks = ceil_div(walk_.end - walk_.begin, kWgmmaM);
    full_ = blocks / Tile::kConsumers;
    other_blocks_ = blocks % Tile::kConsumers;
    others_ = other_blocks_ > 0;
    // Two of two take less time than three and one.
    if (Tile::kConsumers == 3 && other_blocks_ == 1 && full_ > 0) {
      --full_;
      others_ = other_blocks_ = 2;
    }
    return true;
  }

  __device__ Work tile(int index) const {
    const int down = index / width_, across = band_begin_ + (index - down * width_);
    const int begin = walk_.begin + (is_full_ ? 0 : full_ * Tile::kM);
    const int height = kWgmmaM * (is_full_ ? Tile::kConsumers : other_blocks_);
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
  int cta_in_pair_, me_, pairs_, columns_;
  TileQueue queue_;
  WarpWalk walk_;
  int full_ = 0, others_ = 0, other_blocks_ = 0;  // rows of tiles of the group
  // The run.
  bool is_full_ = false;
  int band_begin_ = 1 << 30, width_ = 1, time_ = 0;
  int tiles_ = 0, passed_ = 0;
};

}  // namespace moxie::sm90
