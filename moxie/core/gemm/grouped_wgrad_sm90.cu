#include "moxie/core/gemm/backends.h"
#include "moxie/core/gemm/gemm_kernel.cuh"

namespace moxie::sm90 {

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
  if (args.padding == Padding::kAnything && args.offs)
    p.end_maps = reinterpret_cast<EndMaps*>(args.workspace.data);
  launch_gemm<Ragged::kDepth>({"grouped_wgrad", stream, pairs}, p, tile, args.out.format);
}

}  // namespace moxie::sm90
