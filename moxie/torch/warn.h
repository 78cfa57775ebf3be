// A warning to whoever runs the program: Python's `warnings` where there is Python, torch's
// elsewhere.
#pragma once

#include <string>

namespace moxie::ops {

// Where Python's filters make an error of it, throws.
void warn(const std::string& message);

}  // namespace moxie::ops
