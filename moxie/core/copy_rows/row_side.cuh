// Where rows are in a buffer, as the parameter of a kernel.
#pragma once

#include <algorithm>
#include <limits>

#include "moxie/core/base/cuda.cuh"
#include "moxie/core/copy_rows/copy_rows.h"

namespace moxie::cuda {

// Runs that one launch knows. Messages to more ranks take several launches.
constexpr int kMostRuns = 24;

struct RowSide {
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

// The side with the runs from `first` on, as many as a launch knows.
template <class T>
RowSide row_side(const RowsIn<T>& rows, size_t first) {
  RowSide side{.data = const_cast<std::byte*>(rows.buffer.data),
               .bytes = rows.buffer.dim(0),
               .stride = rows.stride,
               .index = rows.index ? rows.index->data : nullptr};
  const size_t end = min(first + kMostRuns, rows.runs.size());
  side.runs = static_cast<int>(end - first);
  side.end = end < rows.runs.size() ? rows.runs[end].first : std::numeric_limits<int64_t>::max();
  std::copy(rows.runs.begin() + first, rows.runs.begin() + end, side.run);
  return side;
}

}  // namespace moxie::cuda
