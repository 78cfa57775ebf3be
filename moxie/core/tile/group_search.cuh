// Finds the rows a CTA works on: each CTA locates its row tile itself, with a scan over offs. The
// whole kernel waits for this, so it is built for latency.
//
// Outline, from the bottom up ("my groups" are those that a thread looks at):
//   scans         WarpScan, CtaScan       exclusive prefix sums over lanes or threads
//   groups        LaneGroups              neighbouring groups of a lane, any offs (one warp)
//                 ThreadGroups            kMine groups of a thread, offs that do not decrease
//   walks         sums_before             rows, padded rows and tiles of all groups before mine
//                 with_my_groups          distributes groups in one of the two ways below, calls f
//                 find_in_groups          stores the tile if it is in one of my groups
//   entry points  find_row_tile           tile index -> group and rows, for all threads
//                 for_each_group          f(panel) for every group, one thread each
//                 end_of_groups           where the first `count` groups end
//
// Two ways to distribute groups over threads: up to 32 groups use one warp and no barrier
// (LaneGroups); more use all threads (ThreadGroups), unless offs decrease somewhere, which one
// warp repairs with a scan for the largest end so far (LaneGroups again).
//
// 32-bit sums suffice: offs are int32, so rows are below 2^31, and tiles far fewer.
#pragma once

#include "moxie/core/base/cta.cuh"
#include "moxie/core/layout/check_args.h"
#include "moxie/core/layout/row_tiles.h"

namespace moxie::cuda {

// Shared memory of a search: sums passed between warps, and the result.
struct RowTileSearch {
  union {
    int64_t end[kWarps];
    struct {
      uint32_t two[kWarps][2], one[kWarps][1];
    } sums;
  };
  RowTile found;
};

// ---- scans ----

// Exclusive prefix sum over the lanes of a warp.
__device__ inline uint32_t sum_before(uint32_t mine) {
  uint32_t sum = mine;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, sum, step);
    if (lane_index() >= step) sum += other;
  }
  return sum - mine;
}

// Exclusive prefix maximum over the lanes of a warp; 0 in lane 0.
__device__ inline uint32_t max_before(uint32_t mine) {
  uint32_t most = mine;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, most, step);
    if (lane_index() >= step) most = max(most, other);
  }
  most = __shfl_up_sync(~0u, most, 1);
  return lane_index() == 0 ? 0 : most;
}

// Replaces each value by its exclusive prefix sum over the lanes of the warp.
struct WarpScan {
  template <int kN>
  __device__ void operator()(uint32_t (&sum)[kN]) const {
#pragma unroll
    for (uint32_t& one : sum) one = sum_before(one);
  }
};

// Replaces each value by its exclusive prefix sum over all threads of the CTA, with one barrier.
struct CtaScan {
  RowTileSearch& search;

  __device__ void operator()(uint32_t (&sum)[2]) const { scan(sum, search.sums.two); }
  __device__ void operator()(uint32_t (&sum)[1]) const { scan(sum, search.sums.one); }

 private:
  template <int kN>
  static __device__ void scan(uint32_t (&sum)[kN], uint32_t (&of_warp)[kWarps][kN]) {
    uint32_t mine[kN];
#pragma unroll
    for (int i = 0; i < kN; ++i) mine[i] = sum[i];
    WarpScan{}(sum);
    if (lane_index() == kWarp - 1)
#pragma unroll
      for (int i = 0; i < kN; ++i) of_warp[warp_index()][i] = sum[i] + mine[i];
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kWarps - 1; ++w)
      if (w < warp_index())
#pragma unroll
        for (int i = 0; i < kN; ++i) sum[i] += of_warp[w][i];
  }
};

// ---- the groups of a thread ----

// Distributes all groups over the lanes of one warp; each lane has neighbouring groups. Works for
// any offs: decreasing ends are raised to the largest end so far.
class LaneGroups {
 public:
  __device__ explicit LaneGroups(const Panels& panels) : panels_(panels) {
    const auto count = static_cast<int32_t>(panels.count), share = (count + kWarp - 1) / kWarp;
    first_ = min(lane_index() * share, count);
    last_ = min(first_ + share, count);
    if (first_ < last_) first_offs_ = panels.offs[first_];
    uint32_t end = 0;
#pragma unroll 1  // one iteration for up to 32 groups; more only if offs decrease
    for (int32_t g = first_; g < last_; ++g) end = end_of(g, end);
    begin_ = max_before(end);
  }

  __device__ uint32_t begin() const { return begin_; }  // first row of this lane's first group

  // Calls f(group, rows of the group) for this lane's groups until f returns true.
  template <class F>
  __device__ void for_each(F&& f) const {
    uint32_t begin = begin_;
#pragma unroll 1
    for (int32_t g = first_; g < last_; ++g) {
      const uint32_t end = end_of(g, begin);
      if (f(g, end - begin)) return;
      begin = end;
    }
  }

 private:
  __device__ uint32_t end_of(int32_t group, uint32_t begin) const {
    const int32_t offs = group == first_ ? first_offs_ : panels_.offs[group];
    return static_cast<uint32_t>(group_end<int64_t>(offs, begin, panels_.rows));
  }

  const Panels& panels_;
  int32_t first_, last_;
  int32_t first_offs_ = 0;  // cached: with up to 32 groups a lane then loads offs only once
  uint32_t begin_;
};

// Distributes kMine groups to each thread of the CTA. Valid only if offs do not decrease
// (all_rise).
template <int kMine>
class ThreadGroups {
 public:
  __device__ explicit ThreadGroups(const Panels& panels)
      : first_(static_cast<int32_t>(threadIdx.x) * kMine) {
    const int32_t last = static_cast<int32_t>(panels.count) - 1;
    const auto end_of = [&](int32_t group) {  // groups past the last one are empty
      return static_cast<uint32_t>(
          group_end<int64_t>(panels.offs[min(group, last)], 0, panels.rows));
    };
    end_[0] = first_ == 0 ? 0 : end_of(first_ - 1);
#pragma unroll
    for (int i = 0; i < kMine; ++i) end_[i + 1] = end_of(first_ + i);
  }

  // Whether offs do not decrease; if false, this object must not be used. All threads must call it.
  __device__ bool all_rise() const {
    bool rise = true;
#pragma unroll
    for (int i = 0; i < kMine; ++i) rise &= end_[i] <= end_[i + 1];
    return __syncthreads_and(rise);
  }

  __device__ uint32_t begin() const { return end_[0]; }

  template <class F>
  __device__ void for_each(F&& f) const {
#pragma unroll
    for (int i = 0; i < kMine; ++i)
      if (f(first_ + i, end_[i + 1] - end_[i])) return;
  }

 private:
  int32_t first_;
  uint32_t end_[kMine + 1];  // end of the group before this thread's, then those of its own
};

// ---- walks ----

// Sums up rows, padded rows and tiles of all groups before this thread's.
template <Cut kCut, class Groups, class Scan>
__device__ GroupSums<uint32_t> sums_before(const Groups& mine, uint32_t alignment,
                                           const Scan& scan) {
  GroupSums<uint32_t> own;
  mine.for_each([&](int32_t, uint32_t rows) {
    own.add<Cut::kAtPanels>(rows, align_up(rows, alignment));
    return false;
  });
  uint32_t before[2] = {own.padded, own.tiles};
  scan(before);
  GroupSums<uint32_t> sums{
      .begin = mine.begin(), .padded = before[0], .tiles = before[1], .scale_tiles = before[1]};
  // With kInBuffer, a group's number of tiles depends on where the group begins in the buffer,
  // which is known only after the first scan.
  if constexpr (kCut == Cut::kInBuffer) {
    own = {.padded = sums.padded};
    mine.for_each([&](int32_t, uint32_t rows) {
      own.add<kCut>(rows, align_up(rows, alignment));
      return false;
    });
    uint32_t tiles[1] = {own.tiles};
    scan(tiles);
    sums.tiles = tiles[0];
  }
  return sums;
}

// Distributes the groups over all threads, or over the first warp. In each of these threads calls
// f(its groups, sums over the groups before them, whether its groups are the last). All threads
// must call it.
template <Cut kCut, class F>
__device__ void with_my_groups(const Panels& panels, uint32_t alignment, RowTileSearch& search,
                               F&& f) {
  const auto by_all = [&]<int kMine>() {
    const ThreadGroups<kMine> mine(panels);
    if (!mine.all_rise()) return false;
    f(mine, sums_before<kCut>(mine, alignment, CtaScan{search}), threadIdx.x == kThreads - 1);
    return true;
  };
  if (blockDim.x == kThreads && panels.count > kWarp) {
    static_assert(kMaxGroups % kThreads == 0);
    if (panels.count <= kThreads ? by_all.template operator()<1>()
                                 : by_all.template operator()<kMaxGroups / kThreads>())
      return;
  }
  if (warp_index() != 0) return;
  const LaneGroups mine(panels);
  f(mine, sums_before<kCut>(mine, alignment, WarpScan{}), lane_index() == kWarp - 1);
}

// Stores row tile number `tile` in `found` if it belongs to one of this thread's groups; or, if
// these are the last groups, also if it belongs to no group (the tail).
template <Cut kCut, class Groups>
__device__ void find_in_groups(const Groups& mine, GroupSums<uint32_t> sums, bool are_last,
                               const Panels& panels, uint32_t alignment, uint32_t tile,
                               RowTile& found) {
  if (tile < sums.tiles) return;
  bool is_found = false;
  mine.for_each([&](int32_t group, uint32_t rows) {
    const uint32_t padded = align_up(rows, alignment);
    if (tile - sums.tiles < tiles_of_group<kCut>(sums.padded, padded)) {
      const uint32_t before = kCut == Cut::kInBuffer ? sums.padded % kTileRows : 0;
      found = {.panel = sums.panel(group, rows),
               .row = int64_t{tile - sums.tiles} * kTileRows - before,
               .tail = false};
      is_found = true;
    } else {
      sums.add<kCut>(rows, padded);
    }
    return is_found;
  });
  if (!is_found && are_last)
    found = {.panel = sums.panel(panels.count, 0),
             .row = int64_t{tile - sums.tiles} * kTileRows,
             .tail = true};
}

// Finds row tile number `tile`. All threads of the CTA must call it. The result is in shared
// memory, to save registers; it is valid until the next call, which must come after a barrier.
template <Cut kCut = Cut::kAtPanels>
__device__ const RowTile& find_row_tile(const Panels& panels, int64_t alignment, int64_t tile,
                                        RowTileSearch& search) {
  if (!panels.offs) {
    if (threadIdx.x == 0) search.found = row_tile_of_equal_panels(panels, alignment, tile);
  } else {
    const auto step = static_cast<uint32_t>(alignment), index = static_cast<uint32_t>(tile);
    with_my_groups<kCut>(panels, step, search,
                         [&](const auto& mine, const GroupSums<uint32_t>& sums, bool are_last) {
                           find_in_groups<kCut>(mine, sums, are_last, panels, step, index,
                                                search.found);
                         });
  }
  __syncthreads();
  return search.found;
}

// Calls f(panel) for every group, each in one thread. All threads must call it.
template <class F>
__device__ void for_each_group(const Panels& panels, int64_t alignment, RowTileSearch& search,
                               F&& f) {
  const auto step = static_cast<uint32_t>(alignment);
  with_my_groups<Cut::kAtPanels>(panels, step, search,
                                 [&](const auto& mine, GroupSums<uint32_t> sums, bool) {
                                   mine.for_each([&](int32_t group, uint32_t rows) {
                                     if (group < panels.count) f(sums.panel(group, rows));
                                     sums.add<Cut::kAtPanels>(rows, align_up(rows, step));
                                     return false;
                                   });
                                 });
}

// The row where the first `count` groups end. All threads of a CTA (of up to kThreads) must call
// it; it has one barrier.
__device__ inline int64_t end_of_groups(const Panels& panels, int64_t count,
                                        RowTileSearch& search) {
  int64_t end = 0;
  for (int64_t g = threadIdx.x; g < count; g += blockDim.x)
    end = group_end(panels.offs[g], end, panels.rows);
  for (int step = 1; step < kWarp; step *= 2)
    end = max<int64_t>(end, __shfl_xor_sync(~0u, end, step));
  if (lane_index() == 0) search.end[warp_index()] = end;
  __syncthreads();
  for (int w = 0; w < static_cast<int>(blockDim.x / unsigned{kWarp}); ++w)
    end = max<int64_t>(end, search.end[w]);
  return end;
}

}  // namespace moxie::cuda
