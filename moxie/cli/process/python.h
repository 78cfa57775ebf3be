// The Python that the program uses: python3, or the one that MOXIE_PYTHON names.
#pragma once

#include <chrono>
#include <string>

namespace moxie::cli {

std::string python_name();

// Starting Python takes seconds on a slow disk, never a minute.
inline constexpr std::chrono::milliseconds kPythonTimeout = std::chrono::minutes(1);

// The folder of its standard library. Throws Error if there is no Python, or it does not answer in
// time.
std::string python_library(std::chrono::milliseconds timeout = kPythonTimeout);

}  // namespace moxie::cli
