// Padding groups of token rows to an alignment, and back. Moxie's own GEMMs take groups of any
// size; these ops are for other code that needs aligned groups.
#pragma once

#include <cstddef>
#include <limits>
#include <optional>

#include "moxie/core/layout/check_args.h"

namespace moxie {

// The largest alignment at which the padding of kMaxGroups groups fits int32.
inline constexpr int64_t kMaxAlignment = std::numeric_limits<int32_t>::max() / kMaxGroups;

// Rows are bytes, so that every dtype works the same.
struct PadGroupsArgs {
  View<const std::byte> x;   // [R, bytes of a row]
  View<const int32_t> offs;  // [G]
  int64_t alignment = 32;    // 1 to kMaxAlignment; an empty group stays empty
  View<std::byte> padded;    // result, [pad_groups_rows(R, G, alignment), bytes of a row]
  View<int32_t> starts;      // result, [G] first row of each group in padded
  View<int32_t> ends;        // result, [G] end of each group in padded, its zero rows included
};
void pad_groups(const PadGroupsArgs& args, const Exec& exec);

struct UnpadGroupsArgs {
  View<const std::byte> padded;  // [padded rows, bytes of a row]
  View<const int32_t> offs;      // [G] as they were given to pad_groups
  View<const int32_t> starts;    // [G] as pad_groups returned them
  View<std::byte> x;             // result, [R, bytes of a row]; rows that no group covers are 0
};
void unpad_groups(const UnpadGroupsArgs& args, const Exec& exec);

// padded_offs: the ends of the groups after padding. With an alignment of 1 these are offs, but on
// a GPU clamped to valid values (group_end in group_walk.h), which makes them safe for kernels that
// trust their offs.
struct PaddedOffsArgs {
  View<const int32_t> offs;                    // [G]
  std::optional<int64_t> rows = std::nullopt;  // R; absent: most_rows(alignment)
  int64_t alignment = 32;
  View<int32_t> padded;  // result, [G] exclusive ends of the groups, each rounded up
};
// The largest R for which all padded ends fit int32.
constexpr int64_t most_rows(int64_t alignment) {
  return std::numeric_limits<int32_t>::max() - kMaxGroups * (alignment - 1);
}
void padded_offs(const PaddedOffsArgs& args, const Exec& exec);

}  // namespace moxie
