#include "moxie/core/route/route.h"

#include <limits>

#include "moxie/core/base/check.h"
#include "moxie/core/base/dispatch.h"
#include "moxie/core/route/backends.h"

namespace moxie {

void route(const RouteArgs& args, const Exec& exec) {
  const Shape& ids = args.ids.shape;
  MOXIE_CHECK(ids.dims == 2, "route: ids must be [tokens, top_k], got ", ids);
  MOXIE_CHECK(args.offs.shape.dims == 1, "route: offs must be [experts], got ", args.offs.shape);
  const int64_t slots = numel(ids), experts = args.offs.dim(0);
  MOXIE_CHECK(experts >= 1 && experts <= kMaxGroups, "route: there must be 1 to ", kMaxGroups,
              " experts, got ", experts);
  MOXIE_CHECK(slots <= std::numeric_limits<int32_t>::max(),
              "route: tokens * top_k must fit int32, got ", slots);
  check_shape("route", "slot_of", args.slot_of.shape, {slots});
  check_shape("route", "row_of", args.row_of.shape, {slots});
  if (exec.backend == Backend::kCuda) {
    check_shape("route", "workspace", args.workspace.shape, {route_workspace(slots, experts)});
  } else {
    for (int64_t i = 0; i < slots; ++i)
      MOXIE_CHECK(args.ids.data[i] >= 0 && args.ids.data[i] < experts, "route: ids must be 0 to ",
                  experts - 1, ", got ", args.ids.data[i], " at slot ", i);
  }
  // route() has no cpu backend: two passes over a few integers per token are not worth threads.
  dispatch(
      "route", exec, [&] { ref::route(args); }, [&](auto stream) { cuda::route(args, stream); });
}

void top_k(const TopKArgs& args, const Exec& exec) {
  const Shape &scores = args.scores.shape, &ids = args.ids.shape;
  MOXIE_CHECK(scores.dims == 2, "top_k: scores must be [tokens, experts], got ", scores);
  MOXIE_CHECK(ids.dims == 2 && ids[0] == scores[0], "top_k: ids must be [", scores[0],
              ", top_k], got ", ids);
  MOXIE_CHECK(ids[1] >= 1 && ids[1] <= scores[1] && ids[1] <= kMaxTopK,
              "top_k: k must be 1 to the ", scores[1], " experts and at most ", kMaxTopK, ", got ",
              ids[1]);
  dispatch(
      "top_k", exec, [&] { ref::top_k(args); }, [&] { cpu::top_k(args, exec); },
      [&](auto stream) { cuda::top_k(args, stream); });
}

}  // namespace moxie
