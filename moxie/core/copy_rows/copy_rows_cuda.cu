#include <algorithm>
#include <limits>

#include "moxie/core/copy_rows/backends.h"
#include "moxie/core/copy_rows/copy_row.cuh"

namespace moxie::cuda {
namespace {

// Runs that one launch knows: 2 KB of the parameters of a kernel for each side. Messages to more
// ranks take several launches.
constexpr int kMostRuns = 128;

struct Side {
  std::byte* data;
  int64_t bytes, stride;
  const int64_t* index;  // or nullptr
  int runs = 0;
  int64_t end = 0;  // rows from here on are not of these runs
  RowRun run[kMostRuns] = {};

  // The byte at which row r begins; -1 if it is in no run.
  __device__ int64_t begin_of(int64_t r) const {
    const int64_t row = index ? index[r] : r;
    if (row < run[0].first || row >= end) return -1;
    int low = 0, high = runs;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (run[middle].first <= row ? low : high) = middle;
    }
    return run[low].begin + (row - run[low].first) * stride;
  }
};

struct CopyRowsParams {
  Side from, to;
  int64_t rows, width;
  uint64_t alignment;  // of the buffers and the width, as copy_row() takes it
};

// kLanes neighbouring lanes per row.
template <int kLanes>
__global__ __launch_bounds__(kThreads) void copy_rows_kernel(
    const __grid_constant__ CopyRowsParams p) {
  const int64_t r = (work_index() * kThreads + threadIdx.x) / kLanes;
  if (r >= p.rows) return;
  const int64_t from = p.from.begin_of(r), to = p.to.begin_of(r);
  if (from < 0 || to < 0 || from > p.from.bytes - p.width || to > p.to.bytes - p.width) return;
  std::byte* const at = p.to.data + to;
  // Each row in the widest pieces that it allows: messages of other ranks may begin anywhere.
  const uint64_t alignment = p.alignment | static_cast<uint64_t>(from | to);
  copy_row<kLanes>(p.from.data + from, &at, 1, 0, p.width, alignment);
}

using Kernel = void (*)(CopyRowsParams);
struct KernelOf {
  Kernel kernel;
  int lanes;
};

// Scales and numbers of pairs are a few bytes, for which most lanes of a warp would have no piece.
KernelOf kernel_of(int64_t width, uint64_t alignment) {
  const auto piece = min<int64_t>(sizeof(uint4), static_cast<int64_t>(alignment & -alignment));
  const int64_t pieces = ceil_div(width, piece);
  if (pieces == 1) return {copy_rows_kernel<1>, 1};
  if (pieces <= 8) return {copy_rows_kernel<8>, 8};
  return {copy_rows_kernel<kWarp>, kWarp};
}

// The side with the runs from `first` on, as many as a launch knows.
template <class T>
Side side_of(const RowsIn<T>& rows, size_t first) {
  Side side{.data = const_cast<std::byte*>(rows.buffer.data),
            .bytes = rows.buffer.dim(0),
            .stride = rows.stride,
            .index = rows.index ? rows.index->data : nullptr};
  const size_t end = min(first + kMostRuns, rows.runs.size());
  side.runs = static_cast<int>(end - first);
  side.end = end < rows.runs.size() ? rows.runs[end].first : std::numeric_limits<int64_t>::max();
  std::copy(rows.runs.begin() + first, rows.runs.begin() + end, side.run);
  return side;
}

}  // namespace

void copy_rows(const CopyRowsArgs& args, void* stream) {
  for (size_t from = 0; from < args.from.runs.size(); from += kMostRuns)
    for (size_t to = 0; to < args.to.runs.size(); to += kMostRuns) {
      const CopyRowsParams params{.from = side_of(args.from, from),
                                  .to = side_of(args.to, to),
                                  .rows = args.rows,
                                  .width = args.width,
                                  .alignment = bits_of(args.from.buffer.data) |
                                               bits_of(args.to.buffer.data) |
                                               static_cast<uint64_t>(args.width)};
      const auto [kernel, lanes] = kernel_of(args.width, params.alignment);
      launch({"copy_rows", stream, ceil_div<int64_t>(args.rows, kThreads / lanes)}, kernel, params);
    }
}

}  // namespace moxie::cuda
