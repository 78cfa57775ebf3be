#include "moxie/cli/process/python.h"

#include <cstdlib>
#include <filesystem>

#include "moxie/cli/process/output.h"
#include "moxie/cli/process/spawn.h"
#include "moxie/core/base/check.h"

namespace moxie::cli {
namespace {

// A Python script that prints the folder of the standard library. It first takes the current folder
// off Python's search path, as a file there may be called sysconfig.py.
constexpr const char* kAskLibrary =
    "import sys\n"
    "sys.path[:] = filter(None, sys.path)\n"
    "import sysconfig\n"
    "print(sysconfig.get_path('stdlib'))\n";

std::string why_no_library(const Output& output, std::chrono::milliseconds timeout) {
  if (output.end == Output::End::kTimedOut)
    return "it gave no answer within " + std::to_string(timeout.count()) + " ms";
  if (output.code == kNoProgram) return "there is no such program";
  if (output.code != 0) return "it ended with exit code " + std::to_string(output.code);
  return "it names no folder";
}

}  // namespace

std::string python_name() {
  const char* named = std::getenv("MOXIE_PYTHON");
  return named != nullptr && *named != '\0' ? named : "python3";
}

std::string python_library(std::chrono::milliseconds timeout) {
  const std::string python = python_name();
  const Output output = read_output(python, {"-c", kAskLibrary}, timeout);
  if (output.end == Output::End::kExited && output.code == 0) {
    std::error_code error;
    std::string folder = output.text.substr(0, output.text.find('\n'));
    if (std::filesystem::is_directory(folder, error)) return folder;
  }
  fail("--data: '", python, "' does not say where Python's standard library is (",
       why_no_library(output, timeout),
       "); name text files or folders, or another Python in MOXIE_PYTHON");
}

}  // namespace moxie::cli
