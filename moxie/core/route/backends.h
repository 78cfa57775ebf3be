// The backends of route and top_k; arguments arrive checked. Private to this folder.
#pragma once

#include "moxie/core/route/rank.h"
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

}  // namespace moxie
