#include <algorithm>
#include <cstring>

#include "moxie/core/base/parallel.h"
#include "moxie/core/groups/backends.h"
#include "moxie/core/simd/pick_isa.h"

#define MOXIE_ISA_BODY "moxie/core/groups/groups_cpu.inc"
#include "moxie/core/simd/foreach_isa.h"

namespace moxie::cpu {
namespace {

// Least bytes per range of work; below this, handing it to a thread costs more than it saves.
constexpr int64_t kGrainBytes = 1 << 18;

int64_t grain_of(int64_t row_bytes) {
  return max<int64_t>(kGrainBytes / max<int64_t>(row_bytes, 1), 1);
}

// The first group whose end is past `row`, or the number of groups if there is none.
int64_t group_of(const int32_t* ends, int64_t groups, int64_t row) {
  return std::upper_bound(ends, ends + groups, row) - ends;
}

// Copies and zeroes rows of bytes.
struct Rows {
  void (*store_bytes)(void*, const void*, int64_t, bool);
  std::byte* to;
  const std::byte* from;
  int64_t row_bytes;
  bool stream;

  void copy(int64_t to_row, int64_t from_row, int64_t rows) const {
    if (rows * row_bytes > 0)
      store_bytes(to + to_row * row_bytes, from + from_row * row_bytes, rows * row_bytes, stream);
  }
  void zero(int64_t row, int64_t rows) const {
    if (rows * row_bytes > 0) std::memset(to + row * row_bytes, 0, rows * row_bytes);
  }
};

}  // namespace

void pad_groups(const PadGroupsArgs& args, const Exec& exec) {
  const auto store = pick_isa("pad_groups", exec, MOXIE_EACH_ISA(copy_bytes));
  const int64_t groups = args.offs.dim(0), row_bytes = args.x.dim(1);
  const int32_t* const ends = args.ends.data;
  ref::padded_offs({.offs = args.offs, .alignment = args.alignment, .padded = args.ends});
  for (int64_t g = 0; g < groups; ++g) args.starts.data[g] = g ? ends[g - 1] : 0;
  const Rows rows{store, args.padded.data, args.x.data, row_bytes,
                  numel(args.padded.shape) >= kStreamBytes};
  parallel_for(exec, args.padded.dim(0), grain_of(row_bytes), [&](int64_t begin, int64_t end) {
    int64_t g = group_of(ends, groups, begin);
    for (int64_t row = begin; row < end;) {
      while (g < groups && ends[g] <= row) ++g;
      if (g == groups) return rows.zero(row, end - row);
      const int64_t first = g ? args.offs.data[g - 1] : 0, start = args.starts.data[g];
      const int64_t filled = min<int64_t>(start + args.offs.data[g] - first, end);
      if (row < filled) rows.copy(row, first + row - start, filled - row);
      const int64_t stop = min<int64_t>(ends[g], end), rest = max(row, filled);
      rows.zero(rest, stop - rest);
      row = stop;
    }
  });
}

void unpad_groups(const UnpadGroupsArgs& args, const Exec& exec) {
  const auto store = pick_isa("unpad_groups", exec, MOXIE_EACH_ISA(copy_bytes));
  const int64_t groups = args.offs.dim(0), row_bytes = args.x.dim(1);
  const int32_t* const ends = args.offs.data;
  const Rows rows{store, args.x.data, args.padded.data, row_bytes,
                  numel(args.x.shape) >= kStreamBytes};
  parallel_for(exec, args.x.dim(0), grain_of(row_bytes), [&](int64_t begin, int64_t end) {
    int64_t g = group_of(ends, groups, begin);
    for (int64_t row = begin; row < end; ++g) {
      while (g < groups && ends[g] <= row) ++g;
      if (g == groups) return rows.zero(row, end - row);
      const int64_t first = g ? ends[g - 1] : 0, stop = min<int64_t>(ends[g], end);
      rows.copy(row, args.starts.data[g] + row - first, stop - row);
      row = stop;
    }
  });
}

}  // namespace moxie::cpu
