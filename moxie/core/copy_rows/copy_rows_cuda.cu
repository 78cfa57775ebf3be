#include "moxie/core/copy_rows/backends.h"
#include "moxie/core/copy_rows/copy_row.cuh"
#include "moxie/core/copy_rows/row_side.cuh"

namespace moxie::cuda {
namespace {

// Copies that one launch knows: with their runs they fill the 4 KB of parameters that every kernel
// may have.
constexpr int kMostCopies = 4;  // data, scales, padding and pairs

struct Copy {
  RowSide from, to;
  int64_t rows, width;
  uint64_t alignment;  // of the buffers and the width, as copy_row() takes it
  int64_t first_cta;
  int lanes;  // of a row
};

static_assert(kMostCopies * sizeof(Copy) < 4096);

struct CopyRowsParams {
  Copy copy[kMostCopies] = {};
  int copies = 0;
};

template <int kLanes>
__device__ void copy_one(const Copy& p) {
  const int64_t r = ((work_index() - p.first_cta) * kThreads + threadIdx.x) / kLanes;
  if (r >= p.rows) return;
  const int64_t from = p.from.begin_of(r), to = p.to.begin_of(r);
  if (from < 0 || to < 0 || from > p.from.bytes - p.width || to > p.to.bytes - p.width) return;
  std::byte* const at = p.to.data + to;
  // Each row in the widest pieces that it allows: messages of other ranks may begin anywhere.
  const uint64_t alignment = p.alignment | static_cast<uint64_t>(from | to);
  copy_row<kLanes>(p.from.data + from, &at, 1, 0, p.width, alignment);
}

// Neighbouring lanes copy a row: all lanes of a warp, eight, or one.
constexpr int kSomeLanes = 8;

__global__ __launch_bounds__(kThreads) void copy_rows_kernel(
    const __grid_constant__ CopyRowsParams p) {
  int i = p.copies - 1;
  while (i > 0 && work_index() < p.copy[i].first_cta) --i;
  switch (p.copy[i].lanes) {
    case 1: return copy_one<1>(p.copy[i]);
    case kSomeLanes: return copy_one<kSomeLanes>(p.copy[i]);
    default: return copy_one<kWarp>(p.copy[i]);
  }
}

// Scales and numbers of pairs are a few bytes, for which most lanes of a warp would have no piece.
int lanes_of(int64_t width, uint64_t alignment) {
  const auto piece = min<int64_t>(sizeof(uint4), static_cast<int64_t>(alignment & -alignment));
  const int64_t pieces = ceil_div(width, piece);
  return pieces == 1 ? 1 : pieces <= kSomeLanes ? kSomeLanes : kWarp;
}

}  // namespace

void copy_rows(const std::vector<CopyRowsArgs>& all, void* stream) {
  CopyRowsParams params;
  int64_t ctas = 0;
  const auto start = [&] {
    launch({"copy_rows", stream, ctas}, copy_rows_kernel, params);
    params.copies = 0, ctas = 0;
  };
  for (const CopyRowsArgs& args : all) {
    const uint64_t alignment = bits_of(args.from.buffer.data) | bits_of(args.to.buffer.data) |
                               static_cast<uint64_t>(args.width);
    const int lanes = lanes_of(args.width, alignment);
    for (size_t from = 0; from < args.from.runs.size(); from += kMostRuns)
      for (size_t to = 0; to < args.to.runs.size(); to += kMostRuns) {
        params.copy[params.copies++] = {.from = row_side(args.from, from),
                                        .to = row_side(args.to, to),
                                        .rows = args.rows,
                                        .width = args.width,
                                        .alignment = alignment,
                                        .first_cta = ctas,
                                        .lanes = lanes};
        ctas += ceil_div<int64_t>(args.rows, kThreads / lanes);
        if (params.copies == kMostCopies) start();
      }
  }
  start();
}

}  // namespace moxie::cuda
