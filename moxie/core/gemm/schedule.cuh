// Which tile next. One warp per CTA finds out and tells the others through a ring, so that nobody
// waits for its divisions. Every pair of CTAs walks through the same list of tiles, taking every
// num_pairs-th; nothing is shared between pairs, so a run is repeatable.
#pragma once

#include "moxie/core/base/cuda.cuh"
#include "moxie/core/gemm/tile.cuh"
#include "moxie/core/sm90/mbarrier.cuh"

namespace moxie::sm90 {

// Tells the compiler what it cannot see, that all lanes have the same value: stages and
// descriptors then live in uniform registers (12 % of the kernel's speed).
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// The groups one after the other, their ends pulled into line as layout/panel.h has it. A warp
// walks together: it reads offs 32 at a time.
class GroupWalk {
 public:
  __device__ GroupWalk(const GemmParams& p, int unit) : p_(p), unit_(unit) {}

  int group = -1;
  int begin = 0, end = 0;           // rows
  int units_before = 0, units = 0;  // tiles of m, or blocks of k

  // After the last group, the rows that no group covers.
  __device__ void next() {
    ++group;
    if (p_.offs && group < p_.groups && group % cuda::kWarp == 0) {
      const int g = group + cuda::lane_index();
      window_ = g < p_.groups ? p_.offs[g] : 0;
    }
    const int listed = p_.offs ? __shfl_sync(~0u, window_, group % cuda::kWarp) : p_.rows;
    begin = end;
    end = group < p_.groups ? max(begin, min(listed, p_.rows)) : p_.rows;
    units_before += units;
    units = ceil_div(end - begin, unit_);
  }

 private:
  const GemmParams& p_;
  int unit_, window_ = 0;
};

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
class Schedule {
 public:
  __device__ Schedule(const GemmParams& p, const GemmShared<Tile>& shared, int cta_in_pair)
      : p_(p),
        shared_(shared),
        walk_(p, Tile::kRagged == Ragged::kRows ? Tile::kM : kTileK),
        cta_in_pair_(cta_in_pair),
        me_(static_cast<int>(blockIdx.x) / kCluster),
        pairs_(static_cast<int>(gridDim.x) / kCluster) {
    walk_.next();
  }

  __device__ Work next() {
    // There and back again: where tiles get shorter along the list, each pair gets long and short.
    const int index = round_ * pairs_ + (round_ % 2 ? pairs_ - 1 - me_ : me_);
    ++round_;
    const int columns = ceil_div(p_.n, kTileN * kCluster);
    Work work{};
    int tiles_m, first;
    // Groups are met in order, so looking for the next one costs O(G) in all, not per tile.
    if constexpr (Tile::kRagged == Ragged::kRows) {
      while (walk_.group <= p_.groups && index >= (walk_.units_before + walk_.units) * columns)
        walk_.next();
      if (walk_.group > p_.groups) return work;
      work.group = walk_.group;
      tiles_m = walk_.units;
      first = walk_.units_before * columns;
    } else {
      tiles_m = ceil_div(p_.m, Tile::kM);
      const int place = index / (tiles_m * columns);
      if (place >= p_.groups) return work;
      place_depth(work, place);
      first = place * tiles_m * columns;
    }
    const int in_group = index - first, band_tiles = tiles_m * p_.band;
    const int band = in_group / band_tiles, in_band = in_group - band * band_tiles;
    const int width = min(p_.band, columns - band * p_.band);
    const int down = in_band / width, across = band * p_.band + (in_band - down * width);
    work.valid = 1;
    work.col = (across * kCluster + cta_in_pair_) * kTileN;
    if constexpr (Tile::kRagged == Ragged::kRows) {
      work.row = walk_.begin + down * Tile::kM;
      work.rows = min(Tile::kM, walk_.end - work.row);
      work.k_blocks = work.group < p_.groups ? p_.k_blocks : 0;
    } else {
      work.row = down * Tile::kM;
      work.rows = min(Tile::kM, p_.m - work.row);
    }
    if (work.col >= p_.n) work.rows = 0;
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

// A place in a ring of kSize, and how often it went round.
template <int kSize>
struct RingPlace {
  int slot = 0;
  uint32_t phase = 0;

  __device__ void advance() {
    if (++slot == kSize) {
      slot = 0;
      phase ^= 1;
    }
  }
};

// The scheduler's side of the ring: one warp.
template <class Tile>
__device__ void schedule(const GemmParams& p, GemmShared<Tile>& shared, int cta_in_pair) {
  if constexpr (Tile::kRagged == Ragged::kDepth)
    if (p.groups <= GemmShared<Tile>::kSorted) sort_groups(shared, p);
  Schedule<Tile> schedule(p, shared, cta_in_pair);
  RingPlace<GemmShared<Tile>::kWorks> at;
  for (bool more = true; more; at.advance()) {
    const Work work = schedule.next();
    more = work.valid;
    mbarrier_sleep(&shared.work_empty[at.slot], at.phase ^ 1);
    if (cuda::lane_index() == 0) {
      shared.work[at.slot] = work;
      mbarrier_arrive(&shared.work_full[at.slot]);
    }
    __syncwarp();
  }
}

// The other side: a warp, or one thread that speaks for its warp.
template <class Tile>
class WorkQueue {
 public:
  __device__ explicit WorkQueue(GemmShared<Tile>& shared) : shared_(shared) {}

  // The work after the one that was asked for last. It stays where it is until it is released.
  __device__ const Work& next() {
    mbarrier_sleep(&shared_.work_full[at_.slot], at_.phase);
    const Work& work = shared_.work[at_.slot];
    at_.advance();
    return work;
  }
  __device__ void release(const Work& work) {
    mbarrier_arrive(&shared_.work_empty[&work - shared_.work]);
  }

 private:
  GemmShared<Tile>& shared_;
  RingPlace<GemmShared<Tile>::kWorks> at_;
};

}  // namespace moxie::sm90
