// Parses names as users write them in flags, Python and files: "128x32" -> Block{128, 32}. An
// unknown name throws Error with the list of known names.
#pragma once

#include <string_view>

#include "moxie/core/format/block.h"
#include "moxie/core/format/e8m0.h"
#include "moxie/core/layout/swizzle.h"

namespace moxie {

// An error message says that the text is `argument` of `op`.
Block parse_block(std::string_view text, std::string_view op, std::string_view argument);
ScaleRule parse_rule(std::string_view text, std::string_view op);
ScaleLayout parse_layout(std::string_view text, std::string_view op,
                         std::string_view argument = "scale_layout");

}  // namespace moxie
