// The commands of the program `moxie`. Each add_ function adds a command to the command line, which
// runs when the user names it.
#pragma once

#include <CLI/CLI.hpp>

namespace moxie::cli {

// Exit codes of the program, as listed in the help.
enum ExitCode : int {
  kDone = 0,
  kFailed = 1,        // a file could not be read or written, or a child process failed
  kBadInput = 2,      // flags, config, data or checkpoint
  kNotFinite = 3,     // the loss was not finite, and --on-nan is stop
  kInterrupted = 130  // by Ctrl-C or a signal; train writes a checkpoint first
};

void add_train(CLI::App& app);
void add_compare(CLI::App& app);
void add_info(CLI::App& app);
void add_inspect(CLI::App& app);

}  // namespace moxie::cli
