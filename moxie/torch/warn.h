// Warnings for the user: Python's `warnings` if the process runs Python, else torch's.
#pragma once

#include <string>

namespace moxie::ops {

// Throws if Python's filters turn the warning into an error.
void warn(const std::string& message);

}  // namespace moxie::ops
