// Random problems for the ops around the experts: route, top_k, split and
// finish_products, permute and unpermute.
#pragma once

#include "tests/support/cases.h"
#include "tests/support/random.h"

namespace moxie::testing {

Case route_case(Random& random);
Case top_k_case(Random& random);
Case split_case(Random& random);
Case finish_products_case(Random& random);
Case permute_case(Random& random);

}  // namespace moxie::testing
