// The spec as loops.
#include <algorithm>
#include <numeric>
#include <vector>

#include "moxie/core/base/parallel.h"
#include "moxie/core/route/backends.h"

namespace moxie {

namespace ref {

void route(const RouteArgs& args) {
  const int64_t slots = numel(args.ids.shape), experts = args.offs.dim(0);
  std::vector<int32_t> next(experts, 0);
  for (int64_t i = 0; i < slots; ++i) ++next[args.ids.data[i]];
  int32_t end = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int32_t count = next[e];
    next[e] = end;
    args.offs.data[e] = end += count;
  }
  for (int64_t i = 0; i < slots; ++i) {
    const int32_t row = next[args.ids.data[i]]++;
    args.row_of.data[i] = row;
    args.slot_of.data[row] = static_cast<int32_t>(i);
  }
}

void top_k(const TopKArgs& args) {
  const int64_t experts = args.scores.dim(1), k = args.ids.dim(1);
  std::vector<int32_t> order(experts);
  for (int64_t t = 0; t < args.scores.dim(0); ++t) {
    const float* scores = args.scores.data + t * experts;
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(),
              [&](int32_t a, int32_t b) { return ranks_before(scores[a], a, scores[b], b); });
    std::copy_n(order.begin(), k, args.ids.data + t * k);
  }
}

}  // namespace ref

namespace cpu {

// The k best so far, kept in order: k is small, and most scores lose to the last of them at once.
void top_k(const TopKArgs& args, const Exec& exec) {
  const int64_t experts = args.scores.dim(1), k = args.ids.dim(1);
  parallel_for(exec, args.scores.dim(0), 64, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* scores = args.scores.data + t * experts;
      int32_t* ids = args.ids.data + t * k;
      int64_t found = 0;
      for (int32_t e = 0; e < experts; ++e) {
        if (found == k && !ranks_before(scores[e], e, scores[ids[k - 1]], ids[k - 1])) continue;
        int64_t at = found < k ? found++ : k - 1;
        for (; at > 0 && ranks_before(scores[e], e, scores[ids[at - 1]], ids[at - 1]); --at)
          ids[at] = ids[at - 1];
        ids[at] = e;
      }
    }
  });
}

}  // namespace cpu

}  // namespace moxie
