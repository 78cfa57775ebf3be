// The backends of route and top_k; arguments arrive checked. Private to this folder.
#pragma once

#include "moxie/core/route/route.h"

namespace moxie {

namespace ref {
void route(const RouteArgs& args);
void top_k(const TopKArgs& args);
}  // namespace ref
namespace cpu {
void top_k(const TopKArgs& args, const Exec& exec);
}
namespace cuda {
void route(const RouteArgs& args, void* stream);
void top_k(const TopKArgs& args, void* stream);
}  // namespace cuda

// Whether (a, i) comes before (b, j): the larger score, then the smaller id. NaN comes last.
constexpr bool ranks_before(float a, int64_t i, float b, int64_t j) {
  const bool a_nan = a != a, b_nan = b != b;
  if (a_nan != b_nan) return b_nan;
  if (!a_nan && a != b) return a > b;
  return i < j;
}

}  // namespace moxie
