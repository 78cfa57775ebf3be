// Finds Python: python3, or the program that MOXIE_PYTHON names.
#pragma once

#include <chrono>
#include <string>

namespace moxie::cli {

std::string python_name();

// How long to wait for Python: on a slow disk it takes seconds to start, never a minute.
inline constexpr std::chrono::milliseconds kPythonTimeout = std::chrono::minutes(1);

// The folder of Python's standard library. Throws Error if there is no Python, or if it does not
// answer in time.
std::string python_library(std::chrono::milliseconds timeout = kPythonTimeout);

}  // namespace moxie::cli
