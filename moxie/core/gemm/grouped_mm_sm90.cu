#include "moxie/core/gemm/backends.h"
#include "moxie/core/gemm/gemm_kernel.cuh"

namespace moxie::sm90 {

void grouped_mm(const GroupedMmArgs& args, const Panels& panels, void* stream) {
  const int64_t rows = panels.rows, k = panels.cols, groups = panels.count;
  const int64_t n = args.out.dim(1), k_blocks = ceil_div<int64_t>(k, kTileK);
  if (rows == 0) return;
  if (groups == 0) {
    const cuda::Launch how{"grouped_mm", stream, 0};
    return cuda::zero_async(how, args.out.data, rows * n * bytes_of(args.out.format));
  }
  const TileChoice tile = choose_tile({.ragged = Ragged::kRows,
                                       .groups = groups,
                                       .rows = rows,
                                       .n = n,
                                       .k = k,
                                       .pairs = pairs_at_once()});
  GemmParams p{};
  p.a = a_map({args.a.qdata.data, rows, k, k}, tile.rows / kCluster);
  p.b = b_map({args.b.qdata.data, groups * n, k, k}, args.out.format);
  p.out_map = out_map(args.out, rows, n);
  p.scale_a = quads_of(args.a);
  p.scale_b = quads_of(args.b);
  p.offs = panels.offs;
  p.out = args.out.data;
  if (args.bias) {
    p.bias = args.bias->data;
    p.bias_format = args.bias->format;
    p.bias_stride = args.bias->shape.dims == 2 ? static_cast<int>(n) : 0;
  }
  p.groups = static_cast<int>(groups);
  p.rows = static_cast<int>(rows);
  p.n = static_cast<int>(n);
  p.k_blocks = static_cast<int>(k_blocks);
  p.b_rows_of_group = static_cast<int>(n);
  p.band = tile.band;
  // Upper bound: each group, and the uncovered rows at the end, can add one partial tile.
  const int64_t tiles = ceil_div<int64_t>(rows, tile.rows) + groups + 1;
  const int64_t pairs = tiles * ceil_div<int64_t>(n, kTileN * kCluster);
  launch_gemm<Ragged::kRows>({"grouped_mm", stream, pairs}, p, tile, args.out.format);
}

}  // namespace moxie::sm90
