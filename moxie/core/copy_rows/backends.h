// The backends of copy_rows; arguments arrive checked. Private to this folder.
#pragma once

#include <algorithm>

#include "moxie/core/copy_rows/copy_rows.h"

namespace moxie {

// The byte at which row r begins.
template <class T>
int64_t begin_of(const RowsIn<T>& rows, int64_t r) {
  const int64_t row = rows.index ? rows.index->data[r] : r;
  const auto after = std::upper_bound(rows.runs.begin(), rows.runs.end(), row,
                                      [](int64_t at, const RowRun& run) { return at < run.first; });
  if (after == rows.runs.begin()) return -1;
  const RowRun& run = *(after - 1);
  return run.begin + (row - run.first) * rows.stride;
}

namespace ref {
void copy_rows(const CopyRowsArgs& args);
}  // namespace ref
namespace cpu {
void copy_rows(const CopyRowsArgs& args, const Exec& exec);
}  // namespace cpu
namespace cuda {
void copy_rows(const std::vector<CopyRowsArgs>& copies, void* stream);
}  // namespace cuda

}  // namespace moxie
