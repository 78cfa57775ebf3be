// IoError: a file could not be read or written. (If the content of a file is invalid, that is an
// Error.)
#pragma once

#include <cstring>
#include <stdexcept>
#include <string>

namespace moxie::cli {

class IoError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// fail_io("cannot write", "x", ENOSPC) throws "cannot write 'x': No space left on device"
[[noreturn]] inline void fail_io(const std::string& what, const std::string& path, int error) {
  throw IoError(what + " '" + path + "': " + std::strerror(error));
}

}  // namespace moxie::cli
