#include "moxie/core/copy_rows/copy_rows.h"

#include "moxie/core/base/check.h"
#include "moxie/core/base/dispatch.h"
#include "moxie/core/copy_rows/backends.h"
#include "moxie/core/layout/check_args.h"

namespace moxie {
namespace {

constexpr const char* kOp = "copy_rows";

template <class T>
void check_rows(const char* argument, const RowsIn<T>& in, const CopyRowsArgs& args,
                Backend backend) {
  MOXIE_CHECK(in.buffer.shape.dims == 1, kOp, ": the buffer of ", argument,
              " must have one dimension, got ", in.buffer.shape);
  MOXIE_CHECK(!in.runs.empty(), kOp, ": ", argument, " must have a run");
  for (size_t i = 1; i < in.runs.size(); ++i)
    MOXIE_CHECK(in.runs[i - 1].first <= in.runs[i].first, kOp, ": runs of ", argument,
                " must rise, got first row ", in.runs[i].first, " after ", in.runs[i - 1].first);
  const auto check = [&](int64_t r) {
    const int64_t begin = begin_of(in, r);
    MOXIE_CHECK(begin >= 0 && begin <= in.buffer.dim(0) - args.width, kOp, ": row ", r, " of ",
                argument, " must lie in its buffer of ", in.buffer.dim(0), " bytes, got bytes ",
                begin, " to ", begin + args.width);
  };
  if (in.index) {
    check_shape(kOp, "index", in.index->shape, {args.rows});
    if (backend == Backend::kCuda) return;  // only the device can read the index
    for (int64_t r = 0; r < args.rows; ++r) check(r);
    return;
  }
  // The first and the last row of a run bound the others.
  check(0);
  check(args.rows - 1);
  for (const RowRun& run : in.runs)
    if (run.first > 0 && run.first < args.rows) check(run.first), check(run.first - 1);
}

}  // namespace

void copy_rows(const CopyRowsArgs& args, const Exec& exec) {
  copy_rows(std::vector<CopyRowsArgs>{args}, exec);
}

void copy_rows(const std::vector<CopyRowsArgs>& copies, const Exec& exec) {
  std::vector<CopyRowsArgs> to_do;
  for (const CopyRowsArgs& args : copies) {
    MOXIE_CHECK(args.rows >= 0 && args.width >= 0, kOp, ": rows and width must be 0 or more, got ",
                args.rows, " and ", args.width);
    if (args.rows == 0 || args.width == 0) continue;
    check_rows("from", args.from, args, exec.backend);
    check_rows("to", args.to, args, exec.backend);
    MOXIE_CHECK(args.rows == 1 || args.to.stride >= args.width, kOp,
                ": rows of to must not overlap, got a stride of ", args.to.stride,
                " bytes and a width of ", args.width);
    to_do.push_back(args);
  }
  const auto each = [&](auto&& copy) {
    for (const CopyRowsArgs& args : to_do) copy(args);
  };
  dispatch(
      kOp, exec, [&] { each([](const auto& args) { ref::copy_rows(args); }); },
      [&] { each([&](const auto& args) { cpu::copy_rows(args, exec); }); },
      [&](auto stream) { cuda::copy_rows(to_do, stream); });
}

}  // namespace moxie
