// Runs other programs: without a shell, reads their output, and kills them if they hang.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <optional>

#include "moxie/cli/process/children.h"
#include "moxie/cli/process/output.h"
#include "moxie/cli/process/python.h"
#include "moxie/cli/process/spawn.h"
#include "moxie/core/base/check.h"
#include "tests/cli/folder.h"

namespace moxie::testing {
namespace {

using namespace moxie::cli;
using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// A timeout that is long enough on a loaded machine; only a failing test waits this long.
constexpr std::chrono::milliseconds kLong = 30s;

std::string script(const Folder& folder, std::string_view name, std::string_view lines) {
  const std::string path = folder.write(name, "#!/bin/sh\n" + std::string(lines) + "\n");
  ::chmod(path.c_str(), 0755);
  return path;
}

class PythonIs {
 public:
  explicit PythonIs(const std::string& name) {
    if (const char* old = std::getenv("MOXIE_PYTHON")) old_ = old;
    ::setenv("MOXIE_PYTHON", name.c_str(), 1);
  }
  ~PythonIs() {
    if (old_)
      ::setenv("MOXIE_PYTHON", old_->c_str(), 1);
    else
      ::unsetenv("MOXIE_PYTHON");
  }
  PythonIs(const PythonIs&) = delete;
  PythonIs& operator=(const PythonIs&) = delete;

 private:
  std::optional<std::string> old_;
};

// File names with special characters of a shell. If one reached a shell, that would create the file
// `pwned`.
std::vector<std::string> crafted_names(const Folder& folder) {
  const std::string pwned = folder.path("pwned");
  return {"it's python",
          "a b  c",
          "$(touch " + pwned + ")",
          "`touch " + pwned + "`",
          "'; touch pwned'",
          "\"$HOME\" \\x",
          "p; touch " + pwned,
          "x' | touch '" + pwned,
          "-c touch",
          "*?[a]{b,c}~ &#",
          "line\nbreak"};
}

TEST(PythonLibrary, TakesAnInterpreterWhoseNameMeansSomethingToAShell) {
  const Folder folder;
  for (std::string name : crafted_names(folder)) {
    std::replace(name.begin(), name.end(), '/', '_');  // a valid file name
    const PythonIs python(script(folder, name, "echo '" + folder.path() + "'"));
    EXPECT_EQ(python_library(), folder.path()) << name;
  }
  EXPECT_FALSE(std::filesystem::exists(folder.path("pwned")));
}

TEST(PythonLibrary, RunsNothingThatANameOfNoProgramHolds) {
  const Folder folder;
  for (const std::string& name : crafted_names(folder)) {
    const PythonIs python(name);
    EXPECT_THAT([] { python_library(); },
                ThrowsMessage<Error>(AllOf(HasSubstr("'" + name + "'"),
                                           HasSubstr("there is no such program"),
                                           HasSubstr("MOXIE_PYTHON"))));
  }
  EXPECT_FALSE(std::filesystem::exists(folder.path("pwned")));
  EXPECT_FALSE(std::filesystem::exists("pwned"));
}

TEST(PythonLibrary, SaysWhichPythonIsMissing) {
  const PythonIs python("nowhere/python3");
  EXPECT_THAT([] { python_library(); }, ThrowsMessage<Error>(HasSubstr("'nowhere/python3'")));
}

TEST(PythonLibrary, SaysWhatAPythonDidInstead) {
  const Folder folder;
  {
    const PythonIs python(script(folder, "fails", "echo /tmp; exit 3"));
    EXPECT_THAT([] { python_library(); }, ThrowsMessage<Error>(HasSubstr("exit code 3")));
  }
  for (const char* lines : {"", "echo", "echo nowhere/lib", "echo /dev/null"}) {
    const PythonIs python(script(folder, "answers", lines));
    EXPECT_THAT([] { python_library(); }, ThrowsMessage<Error>(HasSubstr("names no folder")));
  }
}

TEST(PythonLibrary, GivesUpAPythonThatHangs) {
  const Folder folder;
  const PythonIs python(script(folder, "hangs", "sleep 1000"));
  EXPECT_THAT(
      [] { python_library(50ms); },
      ThrowsMessage<Error>(AllOf(HasSubstr("hangs'"), HasSubstr("no answer within 50 ms"))));
}

TEST(PythonLibrary, IgnoresModulesInTheCurrentFolder) {
  if (read_output("python3", {"-c", ""}, kLong).code != 0) GTEST_SKIP() << "no python3";
  const Folder folder;
  folder.write("sysconfig.py", "get_path = lambda name: '/tmp'");
  const PythonIs python("python3");
  const std::string library = python_library();
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(folder.path());
  EXPECT_EQ(python_library(), library);
  std::filesystem::current_path(before);
}

TEST(ReadOutput, GivesTextAndExitCode) {
  const Output output = read_output("sh", {"-c", "echo out; echo err >&2; exit 4"}, kLong);
  EXPECT_EQ(output.end, Output::End::kExited);
  EXPECT_EQ(output.code, 4);
  EXPECT_EQ(output.text, "out\n");
  EXPECT_EQ(read_output("sh", {"-c", "kill -TERM $$"}, kLong).code, 128 + SIGTERM);
  EXPECT_EQ(read_output("nowhere/sh", {}, kLong).code, kNoProgram);
  EXPECT_EQ(read_output("cat", {}, kLong).text, "");  // an empty stdin
}

TEST(ReadOutput, KillsWhatTheChildStarted) {
  const Folder folder;
  const std::string pipe = folder.path("pipe");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const std::string lines = "(exec 3<>'" + pipe + "'; sleep 1000) & wait";
  EXPECT_EQ(read_output("sh", {"-c", lines}, 300ms).end, Output::End::kTimedOut);
  // The grandchild holds the pipe open for reading. Opening it for writing succeeds only while it
  // lives, so this waits until it is gone.
  const auto deadline = std::chrono::steady_clock::now() + kLong;
  for (int fd; (fd = ::open(pipe.c_str(), O_WRONLY | O_NONBLOCK)) >= 0; ::close(fd))
    ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "it lives on";
}

TEST(ReadOutput, DoesNotWaitForWhatTheChildLeavesBehind) {
  const Output output = read_output("sh", {"-c", "echo out; sleep 60 & exit 0"}, kLong);
  EXPECT_EQ(output.end, Output::End::kExited);
  EXPECT_EQ(output.text, "out\n");
}

TEST(ReadOutput, KeepsSomeOfWhatNeverEnds) {
  EXPECT_EQ(read_output("yes", {}, 50ms).end, Output::End::kTimedOut);
  const Output output = read_output("sh", {"-c", "yes | head -c 1000000"}, kLong);
  EXPECT_EQ(output.code, 0);
  EXPECT_EQ(output.text.size(), size_t{64} << 10);
}

TEST(Children, AreKilledAfterTheirTimeout) {
  Children children;
  EXPECT_EQ(children.run("sleep", {"1000"}, 50ms), kTimedOut);
  EXPECT_EQ(children.run("sh", {"-c", "exit 5"}, kLong), 5);
  EXPECT_FALSE(children.interrupted());
}

TEST(Children, RunWithoutAShell) {
  const Folder folder;
  Children children;
  EXPECT_EQ(children.run("sh", {"-c", "exit 5"}), 5);
  for (const std::string& name : crafted_names(folder))
    EXPECT_EQ(children.run(name, {name}), kNoProgram) << name;
  EXPECT_FALSE(std::filesystem::exists(folder.path("pwned")));
  EXPECT_FALSE(children.interrupted());
}

}  // namespace
}  // namespace moxie::testing
