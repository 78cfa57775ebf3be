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

void top_k(const TopKArgs& args, const Exec& exec) {
  const int64_t experts = args.scores.dim(1), k = args.ids.dim(1);
  parallel_for(exec, args.scores.dim(0), 64, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      keep_best(args.scores.data + t * experts, experts, k, args.ids.data + t * k);
  });
}

}  // namespace cpu

}  // namespace moxie
