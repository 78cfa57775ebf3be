// Warns the user: through Python's `warnings` if the process runs Python, else through torch.
#pragma once

#include <string>

namespace moxie::ops {

// Throws if Python's filters turn the warning into an error.
void warn(const std::string& message);

}  // namespace moxie::ops
