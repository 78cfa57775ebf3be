#include <algorithm>

#include "moxie/core/groups/backends.h"

namespace moxie::ref {

void padded_offs(const PaddedOffsArgs& args) {
  int64_t begin = 0, padded = 0;
  for (int64_t g = 0; g < args.offs.dim(0); ++g) {
    const int64_t end = args.offs.data[g];
    padded += round_up(end - begin, args.alignment);
    args.padded.data[g] = static_cast<int32_t>(padded);
    begin = end;
  }
}

void pad_groups(const PadGroupsArgs& args) {
  padded_offs({.offs = args.offs, .alignment = args.alignment, .padded = args.ends});
  const int64_t row_bytes = args.x.dim(1);
  std::fill_n(args.padded.data, numel(args.padded.shape), std::byte{});
  int64_t begin = 0, start = 0;
  for (int64_t g = 0; g < args.offs.dim(0); ++g) {
    const int64_t end = args.offs.data[g];
    args.starts.data[g] = static_cast<int32_t>(start);
    std::copy_n(args.x.data + begin * row_bytes, (end - begin) * row_bytes,
                args.padded.data + start * row_bytes);
    begin = end;
    start = args.ends.data[g];
  }
}

void unpad_groups(const UnpadGroupsArgs& args) {
  const int64_t row_bytes = args.x.dim(1);
  std::fill_n(args.x.data, numel(args.x.shape), std::byte{});
  int64_t begin = 0;
  for (int64_t g = 0; g < args.offs.dim(0); ++g) {
    const int64_t end = args.offs.data[g];
    if (end > begin)  // an empty group's start may be anything
      std::copy_n(args.padded.data + args.starts.data[g] * row_bytes, (end - begin) * row_bytes,
                  args.x.data + begin * row_bytes);
    begin = end;
  }
}

}  // namespace moxie::ref
