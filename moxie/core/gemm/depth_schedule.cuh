// The order of tiles in wgrad: group after group, in bands of columns, and in a band row after row.
#pragma once

#include "moxie/core/gemm/schedule.cuh"

namespace moxie::sm90 {

// The deepest groups first, so that the tiles which end the kernel are the short ones.
template <class Tile>
__device__ void sort_groups(GemmShared<Tile>& shared, const GemmParams& p) {
  GroupWalk walk(p, kTileK);
  for (int g = 0; g <= p.groups; ++g) {
    walk.next();
    if (cuda::lane_index() == 0) shared.begin[g] = walk.units_before;
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
class DepthSchedule {
 public:
  __device__ DepthSchedule(const GemmParams& p, GemmShared<Tile>& shared, int cta_in_pair)
      : p_(p),
        shared_(shared),
        walk_(p, kTileK),
        cta_in_pair_(cta_in_pair),
        me_(static_cast<int>(blockIdx.x) / kCluster),
        pairs_(static_cast<int>(gridDim.x) / kCluster) {
    if (p.groups <= GemmShared<Tile>::kSorted) sort_groups(shared, p);
    walk_.next();
  }

  // Pairs take every so many-th tile, there and back again: as tiles get shorter along the list,
  // each pair gets long and short ones.
  __device__ Work next() {
    const int index = round_ * pairs_ + (round_ % 2 ? pairs_ - 1 - me_ : me_);
    ++round_;
    const int columns = ceil_div(p_.n, kTileN * kCluster), tiles_m = ceil_div(p_.m, Tile::kM);
    const int place = index / (tiles_m * columns);
    Work work{};
    if (place >= p_.groups) return work;
    place_depth(work, place);
    const int in_group = index - place * tiles_m * columns, band_tiles = tiles_m * p_.band;
    const int band = in_group / band_tiles, in_band = in_group - band * band_tiles;
    const int width = min(p_.band, columns - band * p_.band);
    const int down = in_band / width, across = band * p_.band + (in_band - down * width);
    work.valid = 1;
    work.col = (across * kCluster + cta_in_pair_) * kTileN;
    work.row = down * Tile::kM;
    work.rows = work.col < p_.n ? min(Tile::kM, p_.m - work.row) : 0;
    return work;
  }

 private:
  __device__ void place_depth(Work& work, int place) {
    if (p_.groups <= GemmShared<Tile>::kSorted) {
      work.group = shared_.order[place];
      work.k_begin = shared_.begin[work.group];
      work.k_blocks = shared_.begin[work.group + 1] - work.k_begin;
      return;
    }
    while (walk_.group < place) walk_.next();
    work.group = place;
    work.k_begin = walk_.units_before;
    work.k_blocks = walk_.units;
  }

  const GemmParams& p_;
  const GemmShared<Tile>& shared_;
  GroupWalk walk_;
  int cta_in_pair_, me_, pairs_;
  int round_ = 0;
};

}  // namespace moxie::sm90
