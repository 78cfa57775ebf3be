// The order of tiles in wgrad. A pair is the two CTAs of a cluster; a group's depth is its rows,
// the contraction. Pairs that work on the same rows of a group share operands through L2, so all
// pairs go through a group together in rounds of one tile per pair: in bands of columns, and row by
// row within a band. The last 0.5 to 1.5 rounds of every group are held back to the end of the
// kernel, where each tile goes to the pair that is free first (left_over). If a group has less than
// half a round of tiles, the tiles of all groups are dealt out in order (dealt).
#pragma once

#include "moxie/core/gemm/tile_queue.cuh"
#include "moxie/core/gemm/warp_walk.cuh"

namespace moxie::sm90 {

// Sorts the groups by depth, deepest first, so that the kernel ends with short tiles.
__device__ inline void sort_groups(ScheduleShared<Ragged::kDepth>& shared,
                                   const ScheduleParams& p) {
  WarpWalk walk(p);
  for (int g = 0; g <= p.groups; ++g) {
    walk.next();
    if (cuda::lane_index() == 0) shared.begin[g] = walk.k_begin;
  }
  __syncwarp();
  const auto depth = [&](int g) { return shared.begin[g + 1] - shared.begin[g]; };
  for (int g = cuda::lane_index(); g < p.groups; g += cuda::kWarp) {
    int rank = 0;
    for (int h = 0; h < p.groups; ++h)
      rank += depth(h) > depth(g) || (depth(h) == depth(g) && h < g);
    shared.order[rank] = static_cast<uint8_t>(g);
  }
  __syncwarp();
}

template <class Tile>
class WgradSchedule {
 public:
  using Shared = ScheduleShared<Ragged::kDepth>;

  __device__ WgradSchedule(const ScheduleParams& p, Shared& shared, int cta_in_pair)
      : p_(p),
        shared_(shared),
        walk_(p),
        cta_in_pair_(cta_in_pair),
        me_(static_cast<int>(blockIdx.x) / kCluster),
        pairs_(static_cast<int>(gridDim.x) / kCluster),
        tiles_m_(ceil_div(p.m, Tile::kM)),
        columns_(ceil_div(p.n, kTileN * kCluster)),
        rounds_(max(0, (2 * tiles_m_ * columns_ / pairs_ - 1) / 2)),
        queue_(shared.queue, pairs_, me_) {
    if (p.groups <= Shared::kSorted) sort_groups(shared, p);
    walk_.next();
  }

  __device__ Work next() {
    if (2 * tiles_m_ * columns_ < pairs_) return dealt();
    if (round_ == rounds_ * p_.groups) return left_over();
    Work work = in_place(round_ / rounds_);
    set_tile(work, round_ % rounds_ * pairs_ + me_);
    ++round_;
    return work;
  }

 private:
  static constexpr int kEndSteps = 2;  // cost of storing a tile, in steps (1.75 measured)

  // Boustrophedon assignment: pair p of P takes tiles p, 2P-1-p, 2P+p, ... Tiles get shorter along
  // the list, so this balances the pairs. A TileQueue would cost more time than tiles this short.
  __device__ Work dealt() {
    const int index = round_ * pairs_ + (round_ % 2 ? pairs_ - 1 - me_ : me_);
    const int tiles = tiles_m_ * columns_, place = index / tiles;
    ++round_;
    if (place >= p_.groups) return {};
    Work work = in_place(place);
    set_tile(work, index - place * tiles);
    return work;
  }

  __device__ Work left_over() {
    const int first = rounds_ * pairs_, end = tiles_m_ * columns_;
    // At most 3/4 of the pairs take a tile at once, so that a pair that is behind can be passed
    // over. With 1/2, 32 groups were 1.6 % slower; with all, nothing would be balanced.
    const int most = ceil_div(3 * pairs_, 4);
    for (;; ++place_, passed_ = 0) {
      if (place_ == p_.groups) return {};
      Work work = in_place(place_);
      while (first + passed_ < end) {
        const int count = min(end - first - passed_, most);
        const int position = queue_.take(count, work.k_blocks + kEndSteps);
        passed_ += count;
        if (position < 0) continue;
        set_tile(work, first + passed_ - count + position);
        return work;
      }
    }
  }

  // Sets the coordinates of tile `index` of its group.
  __device__ void set_tile(Work& work, int index) const {
    const int band_tiles = tiles_m_ * p_.band;
    const int band = index / band_tiles, in_band = index - band * band_tiles;
    const int width = min(p_.band, columns_ - band * p_.band);
    const int down = in_band / width, across = band * p_.band + (in_band - down * width);
    work.valid = 1;
    work.col = (across * kCluster + cta_in_pair_) * kTileN;
    work.row = down * Tile::kM;
    work.rows = work.col < p_.n ? min(Tile::kM, p_.m - work.row) : 0;
  }

  // A tile of the place-th deepest group, without its coordinates.
  __device__ Work in_place(int place) {
    Work work{};
    if (p_.groups <= Shared::kSorted) {
      work.group = shared_.order[place];
      work.k_begin = shared_.begin[work.group];
      work.k_blocks = shared_.begin[work.group + 1] - work.k_begin;
      return work;
    }
    if (place < walk_.group) walk_.restart();
    while (walk_.group < place) walk_.next();
    work.group = place;
    work.k_begin = walk_.k_begin;
    work.k_blocks = walk_.k_blocks;
    return work;
  }

  const ScheduleParams& p_;
  const Shared& shared_;
  WarpWalk walk_;
  int cta_in_pair_, me_, pairs_;
  int tiles_m_, columns_;
  int rounds_;  // per group; at least half a round stays for left_over(), which balances the pairs
  int round_ = 0;
  int place_ = 0, passed_ = 0;  // left_over(): the group, and how many of its tiles are taken
  TileQueue queue_;
};

}  // namespace moxie::sm90
