// The program moxie: runs its commands train, compare, info and inspect, and turns errors into exit
// codes.
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <malloc.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string_view>

#include "moxie/cli/command.h"
#include "moxie/cli/file/error.h"
#include "moxie/cli/text.h"
#include "moxie/cli/train/loop.h"
#include "moxie/core/base/check.h"

namespace moxie::cli {
namespace {

constexpr const char* kMore =
    "Exit codes: 0 done, 1 a file could not be read or written, 2 bad input, 3 the loss was not\n"
    "finite, 130 interrupted. Progress goes to stderr, results to stdout.";

// Keeps oneDNN and MKL from using AMX: in virtual machines that lose AMX tile state at a context
// switch, AMX kernels die of SIGILL, and a program cannot detect such a machine. Settings by the
// user win.
void avoid_amx() {
  ::setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", /*overwrite=*/0);
  ::setenv("MKL_ENABLE_INSTRUCTIONS", "AVX512_E3", /*overwrite=*/0);
}

// Keeps malloc from returning freed memory to the system: a training step allocates what the step
// before freed, and returned memory costs a page fault for each page.
void keep_pages() {
  ::mallopt(M_MMAP_THRESHOLD, 1 << 30);
  ::mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
}

// Handles SIGBUS, which reading a mapped file raises if the file was truncated or its disk fails.
// Nothing can be saved here, but the last checkpoint is complete whenever a run ends.
void end_on_bus_error(int) {
  constexpr std::string_view kText =
      "moxie: a file became shorter, or its disk failed, while it was being read; --resume goes "
      "on\n"
      "from the last checkpoint once the file is back\n";
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, kText.data(), kText.size());
  ::_exit(kFailed);
}

// Opens standard streams that are closed. Otherwise the next file to be opened would become stdout
// or stderr, and printed text would be written into it.
void open_standard_files() {
  for (int fd = 0; fd <= STDERR_FILENO; ++fd)
    if (::fcntl(fd, F_GETFD) < 0) ::open("/dev/null", O_RDWR);
}

void end_at_once(int) {
  constexpr std::string_view kText = "moxie: interrupted; nothing was written\n";
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, kText.data(), kText.size());
  ::_exit(kInterrupted);
}

// Installs handlers before torch's libraries initialise themselves, which takes longer than
// everything else before the first step. train and compare, which write files, handle these signals
// themselves later. (Not sanitized, because the sanitizers are not initialised yet.)
__attribute__((no_sanitize_address, no_sanitize_undefined)) void handle_early_signals() {
  for (const int number : {SIGINT, SIGTERM, SIGHUP})
    if (::signal(number, end_at_once) == SIG_IGN) ::signal(number, SIG_IGN);
}
__attribute__((section(".preinit_array"), used)) void (*const preinit)() = handle_early_signals;

void handle_signals() {
  std::signal(SIGBUS, end_on_bus_error);
  std::signal(SIGXFSZ, SIG_IGN);  // instead, write() fails if a file exceeds its size limit
  std::signal(SIGPIPE, SIG_IGN);  // instead, write() fails if a pipe has no reader, and train stops
}

int say(const std::exception& error, int code) {
  std::fprintf(stderr, "moxie: %s\n", plain(error.what()).c_str());
  return code;
}

// Prints an error of torch without the C++ stack that follows the first line of its message.
int say_torch(const c10::Error& error) {
  std::fprintf(stderr, "moxie: %s\n", plain_lines(error.what_without_backtrace()).c_str());
  return kFailed;
}

int run(int argc, char** argv) {
  CLI::App app("Moxie trains mixture-of-experts models in MXFP8.", "moxie");
  app.require_subcommand(1);
  app.footer(kMore);
  add_train(app);
  add_compare(app);
  add_info(app);
  add_inspect(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kDone : kBadInput;
  } catch (const NotFinite& error) {
    return say(error, kNotFinite);
  } catch (const Interrupted& error) {
    return say(error, kInterrupted);
  } catch (const Error& error) {
    return say(error, kBadInput);
  } catch (const c10::ValueError& error) {
    say_torch(error);
    return kBadInput;
  } catch (const c10::Error& error) {
    return say_torch(error);
  } catch (const std::exception& error) {
    return say(error, kFailed);
  }
  return kDone;
}

}  // namespace
}  // namespace moxie::cli

int main(int argc, char** argv) {
  moxie::cli::open_standard_files();
  moxie::cli::avoid_amx();
  moxie::cli::keep_pages();
  moxie::cli::handle_signals();
  const int code = moxie::cli::run(argc, argv);
  // If the output could not be written, the program has failed. It says so, unless the reader of
  // the pipe has gone.
  errno = 0;
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  if (errno != EPIPE) std::fprintf(stderr, "moxie: cannot write to stdout\n");
  return code == moxie::cli::kDone ? moxie::cli::kFailed : code;
}
