#include <algorithm>

#include "moxie/core/groups/backends.h"

namespace moxie::ref {

namespace {

// Calls f(panel) for every group of a tensor of `rows` rows.
template <class F>
void for_each_group(const View<const int32_t>& offs, int64_t rows, int64_t alignment, F&& f) {
  const Panels panels{
      .rows = rows, .cols = 0, .count = offs.dim(0), .offs = offs.data, .weights = false};
  Panel panel = first_panel();
  for (int64_t g = 0; g < panels.count; ++g) {
    panel = next_panel(panels, panel, alignment);
    f(panel);
  }
}

}  // namespace

void padded_offs(const PaddedOffsArgs& args) {
  const int64_t rows = args.rows.value_or(most_rows(args.alignment));
  for_each_group(args.offs, rows, args.alignment, [&](const Panel& panel) {
    args.padded.data[panel.index] =
        static_cast<int32_t>(panel.padded + round_up(panel.rows, args.alignment));
  });
}

void pad_groups(const PadGroupsArgs& args) {
  padded_offs({.offs = args.offs, .alignment = args.alignment, .padded = args.ends});
  const int64_t row_bytes = args.x.dim(1);
  std::fill_n(args.padded.data, numel(args.padded.shape), std::byte{});
  for_each_group(args.offs, args.x.dim(0), args.alignment, [&](const Panel& panel) {
    args.starts.data[panel.index] = static_cast<int32_t>(panel.padded);
    std::copy_n(args.x.data + panel.begin * row_bytes, panel.rows * row_bytes,
                args.padded.data + panel.padded * row_bytes);
  });
}

void unpad_groups(const UnpadGroupsArgs& args) {
  const int64_t row_bytes = args.x.dim(1);
  std::fill_n(args.x.data, numel(args.x.shape), std::byte{});
  for_each_group(args.offs, args.x.dim(0), 1, [&](const Panel& panel) {
    if (panel.rows > 0)  // the start of an empty group is not checked
      std::copy_n(args.padded.data + args.starts.data[panel.index] * row_bytes,
                  panel.rows * row_bytes, args.x.data + panel.begin * row_bytes);
  });
}

}  // namespace moxie::ref
