// Names as users write them, in flags, Python and files. A wrong one is answered with the list.
#pragma once

#include <string_view>

#include "moxie/core/format/e8m0.h"
#include "moxie/core/layout/swizzle.h"

namespace moxie {

ScaleRule parse_rule(std::string_view text, std::string_view op);
ScaleLayout parse_layout(std::string_view text, std::string_view op);

}  // namespace moxie
