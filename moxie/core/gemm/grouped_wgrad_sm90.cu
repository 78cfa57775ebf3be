#include "moxie/core/gemm/backends.h"
#include "moxie/core/gemm/gemm_kernel.cuh"
#include "moxie/core/ptx/grid_dependency.cuh"
#include "moxie/core/ptx/tensor_map_change.cuh"
#include "moxie/core/tile/group_search.cuh"

namespace moxie::sm90 {
namespace {

struct GroupMapsParams {
  GroupMaps whole;  // the maps of the whole operands
  Panels panels;
  GroupMaps* maps;  // result, [G]
};

// Where groups end is known on the device only, so it makes the maps.
__global__ __launch_bounds__(cuda::kThreads) void group_maps_kernel(
    const __grid_constant__ GroupMapsParams p) {
  __shared__ cuda::RowTileSearch search;
  ptx::launch_dependents();
  cuda::for_each_group(p.panels, kTileK, search, [&](const Panel& panel) {
    GroupMaps& maps = p.maps[panel.index];
    maps = p.whole;
    const auto end = static_cast<uint32_t>(panel.padded + panel.rows);
    ptx::tensormap_set_size(&maps.a, end);
    ptx::tensormap_set_size(&maps.b, end);
    ptx::fence_tensormap_release();
  });
}

}  // namespace

// A group is a range of k blocks in buffers that all groups share, so one tensor map per buffer
// serves every group.
void grouped_wgrad(const GroupedWgradArgs& args, const Panels& panels, void* stream) {
  const int64_t groups = panels.count, padded = args.a.qdata.dim(1);
  const int64_t m = args.out.dim(1), n = args.out.dim(2);
  if (groups == 0) return;
  if (padded == 0) {
    if (args.sum == Sum::kAdd) return;
    const cuda::Launch how{"grouped_wgrad", stream, 0};
    return cuda::zero_async(how, args.out.data, groups * m * n * bytes_of(args.out.format));
  }
  const TileChoice tile = choose_tile({.ragged = Ragged::kDepth,
                                       .groups = groups,
                                       .rows = groups * m,
                                       .n = n,
                                       .k = ceil_div(padded, groups),
                                       .pairs = pairs_at_once()});
  // TMA reads zeros past this many rows: without offs, the padding as well.
  const int64_t k = args.offs ? padded : args.rows;
  GemmParams p{};
  p.a = a_map({args.a.qdata.data, m, k, padded}, tile.rows / kCluster);
  p.b = b_map({args.b.qdata.data, n, k, padded}, args.out.format);
  p.out_map = out_map(args.out, groups * m, n);
  p.scale_a = quads_of(args.a);
  p.scale_b = quads_of(args.b);
  p.offs = panels.offs;
  p.out = args.out.data;
  p.groups = static_cast<int>(groups);
  p.rows = static_cast<int>(args.rows);
  p.m = static_cast<int>(m);
  p.n = static_cast<int>(n);
  p.band = tile.band;
  p.add = args.sum == Sum::kAdd;
  const int64_t pairs =
      groups * ceil_div<int64_t>(m, tile.rows) * ceil_div<int64_t>(n, kTileN * kCluster);
  GemmLaunch how{"grouped_wgrad", stream, pairs};
  if (args.padding == Padding::kAnything && args.offs) {
    auto* const maps = reinterpret_cast<GroupMaps*>(args.workspace.data);
    cuda::launch({"grouped_wgrad", stream, 1}, group_maps_kernel,
                 GroupMapsParams{.whole = {p.a, p.b}, .panels = panels, .maps = maps});
    p.group_maps = maps;
    how.start = Start::kBesidePrevious;  // the maps are first needed at the end of a tile
  }
  launch_gemm<Ragged::kDepth>(how, p, tile, args.out.format);
}

}  // namespace moxie::sm90
