#include "moxie/core/copy_rows/backends.h"

namespace moxie::ref {

void copy_rows(const CopyRowsArgs& args) {
  for (int64_t r = 0; r < args.rows; ++r) {
    const int64_t from = begin_of(args.from, r), to = begin_of(args.to, r);
    for (int64_t i = 0; i < args.width; ++i)
      args.to.buffer.data[to + i] = args.from.buffer.data[from + i];
  }
}

}  // namespace moxie::ref
