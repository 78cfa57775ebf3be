// The backends of split and finish_products; arguments arrive checked. Private to this folder.
#pragma once

#include "moxie/core/split/finish_products.h"
#include "moxie/core/split/split.h"

namespace moxie {

namespace ref {
void split(const SplitArgs& args);
void finish_products(const FinishProductsArgs& args);
}  // namespace ref
namespace cuda {
void split(const SplitArgs& args, void* stream);
void finish_products(const FinishProductsArgs& args, void* stream);
}  // namespace cuda

}  // namespace moxie
