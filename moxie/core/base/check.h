// Errors: every message names the op, the rule and the value. The library never prints or exits.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace moxie {

// What every function of the library throws when its arguments are wrong.
class Error : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// What they throw when a GPU fails: a launch that is refused, memory that is used up, a lost
// context. The arguments may have been right, so that it is no Error.
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
// The parts are only evaluated when the condition is false.
#define MOXIE_CHECK(condition, ...) \
  do {                              \
    if (!(condition)) [[unlikely]]  \
      ::moxie::fail(__VA_ARGS__);   \
  } while (false)
