// Copies rows of bytes between buffers in which they lie apart: in the messages of expert
// parallelism (layout/wire.h), or at rows that an index names.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "moxie/core/base/exec.h"
#include "moxie/core/base/view.h"

namespace moxie {

// Rows that follow each other: row `first` of the buffer begins at byte `begin`.
struct RowRun {
  int64_t first = 0;
  int64_t begin = 0;
};

// Where rows are in a buffer. A run ends where the next one begins.
template <class T>
struct RowsIn {
  View<T> buffer;                                           // [bytes]
  int64_t stride;                                           // bytes between rows of a run
  std::vector<RowRun> runs = {{}};                          // by rising `first`
  std::optional<View<const int64_t>> index = std::nullopt;  // [rows]: which row of the buffer
};

// The byte at which row r begins; -1 if it is in no run. For the host, if an index is there.
template <class T>
int64_t begin_of(const RowsIn<T>& rows, int64_t r) {
  const int64_t row = rows.index ? rows.index->data[r] : r;
  const auto after = std::upper_bound(rows.runs.begin(), rows.runs.end(), row,
                                      [](int64_t at, const RowRun& run) { return at < run.first; });
  if (after == rows.runs.begin()) return -1;
  const RowRun& run = *(after - 1);
  return run.begin + (row - run.first) * rows.stride;
}

// Row r of `from` goes to row r of `to`: its first `width` bytes. Rows of `to` must not overlap.
struct CopyRowsArgs {
  int64_t rows, width;
  RowsIn<const std::byte> from;
  RowsIn<std::byte> to;
};

// On a GPU, a row that an index puts outside a buffer is left out; elsewhere it is an error.
void copy_rows(const CopyRowsArgs& args, const Exec& exec);
// Several copies in any order, on a GPU in one launch. None may read what another one writes.
void copy_rows(const std::vector<CopyRowsArgs>& copies, const Exec& exec);

}  // namespace moxie
