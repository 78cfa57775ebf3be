#include "moxie/cli/compare/report.h"

#include <chrono>
#include <cstdio>

#include "moxie/cli/process/python.h"
#include "moxie/cli/process/spawn.h"
#include "moxie/cli/text.h"

namespace moxie::cli {

extern const char* const kReportScript;    // the text of report.py; CMake generates it
extern const char* const kPicturesScript;  // pictures.py

// Drawing many runs takes seconds; the rest of this allows for a slow disk.
constexpr auto kReportTimeout = std::chrono::minutes(10);

bool write_report(const CompareFolder& folder, Children& children) {
  const std::string python = python_name();
  const int code =
      children.run(python, {"-c", kReportScript, folder.path, kPicturesScript}, kReportTimeout);
  if (code == 0) return true;
  const std::string why = code == kNoProgram  ? "there is no such program"
                          : code == kTimedOut ? "it was not done after 10 minutes"
                                              : "it ended with exit code " + std::to_string(code);
  std::fprintf(stderr,
               "moxie: no report.html, as '%s' could not write it (%s); MOXIE_PYTHON names another "
               "Python, and the numbers are in '%s'\n",
               plain(python).c_str(), why.c_str(), plain(folder.result()).c_str());
  return false;
}

}  // namespace moxie::cli
