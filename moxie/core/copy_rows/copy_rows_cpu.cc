#include <cstring>

#include "moxie/core/base/math.h"
#include "moxie/core/base/parallel.h"
#include "moxie/core/copy_rows/backends.h"

namespace moxie::cpu {

void copy_rows(const CopyRowsArgs& args, const Exec& exec) {
  // At least 64 KB per thread: below that, waking one costs more than it saves.
  const int64_t grain = max<int64_t>(1, (64 << 10) / args.width);
  parallel_for(exec, args.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      std::memcpy(args.to.buffer.data + begin_of(args.to, r),
                  args.from.buffer.data + begin_of(args.from, r), args.width);
  });
}

}  // namespace moxie::cpu
