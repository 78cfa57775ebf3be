// In general a tile of rows is gathered from x. If only the rowwise form is wanted and row_of is
// given, a warp quantizes a token once and stores it in all of its rows.
#include "moxie/core/permute/backends.h"
#include "moxie/core/permute/gather_source.cuh"
#include "moxie/core/quantize/quantize_kernel.cuh"
#include "moxie/core/quantize/quantize_row.cuh"
#include "moxie/core/route/route.h"
#include "moxie/core/tile/covered_rows.cuh"

namespace moxie::cuda {
namespace {

struct ScatterParams {
  const void* x;
  const int32_t* row_of;
  std::byte *qdata, *scale;
  int64_t tokens, top_k, rows, scales;  // scales: of a row
  CoveredRows covered;                  // the others are zeros
  ScaleLayout layout;                   // plain or quads
  RowQuantizer quantizer;
};

constexpr int kQuad = 4;  // scales that are stored together in the layout kQuads

// The scales of a row; zeros if it is of no group.
__device__ void store_scales(const ScatterParams& p, const std::byte* codes, int64_t row,
                             bool is_covered) {
  if (p.layout == ScaleLayout::kPlain) {
    std::byte* const to = p.scale + row * p.scales;
    for (int64_t i = lane_index(); i < p.scales; i += kWarp)
      to[i] = is_covered ? codes[i] : std::byte{};
    return;
  }
  for (int64_t q = lane_index(); q * kQuad < p.scales; q += kWarp) {
    const uint32_t four = reinterpret_cast<const uint32_t*>(codes)[q];
    reinterpret_cast<uint32_t*>(p.scale)[q * p.rows + row] = is_covered ? four : 0;
  }
}

template <class T>
__global__ __launch_bounds__(kThreads) void scatter_kernel(
    const __grid_constant__ ScatterParams p) {
  __shared__ int32_t rows_of_token[kWarps][kMaxTopK];
  __shared__ RowScales scales;
  const int64_t token = work_index() * kWarps + warp_index(), dim = p.quantizer.dim;
  if (token >= p.tokens) return;
  int32_t* const rows = rows_of_token[warp_index()];
  for (int64_t j = lane_index(); j < p.top_k; j += kWarp) {
    const int32_t row = p.row_of[token * p.top_k + j];
    rows[j] = min<int32_t>(max<int32_t>(row, 0), static_cast<int32_t>(p.rows) - 1);
  }
  __syncwarp();
  const int64_t covered = p.covered.count();
  std::byte* const codes = scales.code[warp_index()];
  p.quantizer.quantize(static_cast<const T*>(p.x) + token * dim, codes,
                       [&](int64_t col, uint2 bytes) {
                         for (int64_t j = 0; j < p.top_k; ++j)
                           *reinterpret_cast<uint2*>(p.qdata + rows[j] * dim + col) =
                               rows[j] < covered ? bytes : uint2{};
                       });
  // The last quad is filled up with zeros.
  if (lane_index() < kQuad && p.scales + lane_index() < round_up<int64_t>(p.scales, kQuad))
    codes[p.scales + lane_index()] = {};
  __syncwarp();
  for (int64_t j = 0; j < p.top_k; ++j) store_scales(p, codes, rows[j], rows[j] < covered);
}

bool fits_scatter(const PermuteQuantizeArgs& args) {
  // One row per token is gathered as fast.
  return args.row_of && args.top_k > 1 && args.top_k <= kMaxTopK && args.forms.rowwise &&
         !args.forms.colwise && args.forms.rowwise->layout != ScaleLayout::kSwizzled &&
         are_rows_aligned(args.forms.rowwise->scale.data, 0, kQuad) &&
         fits_row_quantizer(args.x, *args.forms.rowwise);
}

void scatter(const PermuteQuantizeArgs& args, const Panels& panels, void* stream) {
  const QuantizedOut& out = *args.forms.rowwise;
  const ScatterParams params{.x = args.x.data,
                             .row_of = args.row_of->data,
                             .qdata = reinterpret_cast<std::byte*>(out.qdata.data),
                             .scale = reinterpret_cast<std::byte*>(out.scale.data),
                             .tokens = args.x.dim(0),
                             .top_k = args.top_k,
                             .rows = panels.rows,
                             .scales = ceil_div<int64_t>(args.x.dim(1), out.block.cols),
                             .covered = CoveredRows(args.forms.offs, panels.rows),
                             .layout = out.layout,
                             .quantizer = row_quantizer(args.x.dim(1), out.block, args.forms.rule)};
  launch({"permute_quantize", stream, ceil_div<int64_t>(params.tokens, kWarps)},
         args.x.format == Format::kF32 ? scatter_kernel<float> : scatter_kernel<bf16>, params);
}

}  // namespace

void permute_quantize(const PermuteQuantizeArgs& args, const Panels& panels, void* stream) {
  if (fits_scatter(args)) return scatter(args, panels, stream);
  const auto start = [&]<class T, bool kAligned>() {
    launch_quantize("permute_quantize", args.forms, panels,
                    GatherSource<T, kAligned>{{},
                                              static_cast<const T*>(args.x.data),
                                              args.slot_of.data,
                                              args.top_k,
                                              panels.rows,
                                              panels.cols,
                                              nullptr},
                    stream);
  };
  if (args.x.format == Format::kF32) return start.template operator()<float, false>();
  with_alignment(are_rows_aligned(static_cast<const bf16*>(args.x.data), panels.cols, kFragment) &&
                     are_forms_aligned(args.forms),
                 [&]<bool kAligned>() { start.template operator()<bf16, kAligned>(); });
}

}  // namespace moxie::cuda
