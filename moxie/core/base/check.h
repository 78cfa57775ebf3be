// Errors: every message names the op, the rule and the value. The library never prints or exits.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace moxie {

// Thrown by every function of the library for invalid arguments.
class Error : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Thrown if a GPU fails: a refused launch, out of memory, a lost context. It is not an Error,
// because the arguments may have been valid.
class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Error(message.str());
}

}  // namespace moxie

// MOXIE_CHECK(cols > 0, "pad_groups: cols must be positive, got ", cols);
// The parts are evaluated only if the condition is false.
#define MOXIE_CHECK(condition, ...) \
  do {                              \
    if (!(condition)) [[unlikely]]  \
      ::moxie::fail(__VA_ARGS__);   \
  } while (false)
