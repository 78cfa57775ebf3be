// The Python of the program: python3, or what MOXIE_PYTHON names.
#pragma once

#include <chrono>
#include <string>

namespace moxie::cli {

std::string python_name();

// Seconds where a disk is slow; a minute is no longer slowness.
inline constexpr std::chrono::milliseconds kPythonTimeout = std::chrono::minutes(1);

// The folder of its standard library. Error where there is none, or no answer in time.
std::string python_library(std::chrono::milliseconds timeout = kPythonTimeout);

}  // namespace moxie::cli
