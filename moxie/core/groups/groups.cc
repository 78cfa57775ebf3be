#include "moxie/core/groups/groups.h"

#include <limits>

#include "moxie/core/base/check.h"
#include "moxie/core/base/dispatch.h"
#include "moxie/core/groups/backends.h"

namespace moxie {
namespace {

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();

void check_alignment(std::string_view op, int64_t alignment) {
  MOXIE_CHECK(alignment >= 1 && alignment <= kMaxAlignment, op, ": alignment must be 1 to ",
              kMaxAlignment, ", got ", alignment);
}

void check_rows(std::string_view op, std::string_view argument, const Shape& shape) {
  MOXIE_CHECK(shape.dims == 2, op, ": ", argument, " must be [rows, cols], got ", shape);
  MOXIE_CHECK(shape[0] <= kInt32Max, op, ": rows must fit the int32 of offs, got ", shape[0]);
}

}  // namespace

void pad_groups(const PadGroupsArgs& args, const Exec& exec) {
  constexpr std::string_view kOp = "pad_groups";
  check_rows(kOp, "x", args.x.shape);
  check_alignment(kOp, args.alignment);
  check_offs(kOp, args.offs, args.x.dim(0), "rows", exec.backend);
  const int64_t groups = args.offs.dim(0);
  const int64_t rows = pad_groups_rows(args.x.dim(0), groups, args.alignment);
  MOXIE_CHECK(rows <= kInt32Max, kOp, ": padded rows must fit int32, got ", rows);
  check_shape(kOp, "padded", args.padded.shape, {rows, args.x.dim(1)});
  check_shape(kOp, "starts", args.starts.shape, {groups});
  check_shape(kOp, "ends", args.ends.shape, {groups});
  dispatch(
      kOp, exec, [&] { ref::pad_groups(args); }, [&] { cpu::pad_groups(args, exec); },
      [&](auto stream) { cuda::pad_groups(args, stream); });
}

void unpad_groups(const UnpadGroupsArgs& args, const Exec& exec) {
  constexpr std::string_view kOp = "unpad_groups";
  check_rows(kOp, "padded", args.padded.shape);
  check_rows(kOp, "x", args.x.shape);
  check_shape(kOp, "x", args.x.shape, {args.x.dim(0), args.padded.dim(1)});
  check_offs(kOp, args.offs, args.x.dim(0), "rows", exec.backend);
  const int64_t groups = args.offs.dim(0);
  check_shape(kOp, "starts", args.starts.shape, {groups});
  if (exec.backend != Backend::kCuda) {
    for (int64_t g = 0, begin = 0; g < groups; begin = args.offs.data[g++]) {
      const int64_t rows = args.offs.data[g] - begin, start = args.starts.data[g];
      MOXIE_CHECK(rows == 0 || (start >= 0 && start + rows <= args.padded.dim(0)), kOp, ": group ",
                  g, " must lie inside the ", args.padded.dim(0), " padded rows, got start ", start,
                  " for ", rows, " rows");
    }
  }
  dispatch(
      kOp, exec, [&] { ref::unpad_groups(args); }, [&] { cpu::unpad_groups(args, exec); },
      [&](auto stream) { cuda::unpad_groups(args, stream); });
}

void padded_offs(const PaddedOffsArgs& args, const Exec& exec) {
  constexpr std::string_view kOp = "padded_offs";
  check_alignment(kOp, args.alignment);
  const int64_t most = most_rows(args.alignment), rows = args.rows.value_or(most);
  MOXIE_CHECK(rows >= 0 && rows <= most, kOp, ": rows must be 0 to ", most,
              ", so that their padded ends fit int32, got ", rows);
  check_offs(kOp, args.offs, rows, args.rows ? "rows" : "rows that can be padded", exec.backend);
  check_shape(kOp, "padded", args.padded.shape, args.offs.shape);
  dispatch(  // no cpu backend: ref does at most 1024 additions
      kOp, exec, [&] { ref::padded_offs(args); },
      [&](auto stream) { cuda::padded_offs(args, stream); });
}

}  // namespace moxie
