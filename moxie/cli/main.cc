// moxie: trains, compares, inspects.
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

// Keeps oneDNN from using AMX: AMX kernels die (SIGILL) in virtual machines that lose tile state at
// a context switch, and a program cannot detect that. The user's own setting wins.
void avoid_amx() {
  ::setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", /*overwrite=*/0);
  ::setenv("MKL_ENABLE_INSTRUCTIONS", "AVX512_E3", /*overwrite=*/0);
}

// Keeps freed pages: a step frees what the next one allocates, and returning large blocks to the
// system in between, as malloc does, costs a page fault for each page.
void keep_pages() {
  ::mallopt(M_MMAP_THRESHOLD, 1 << 30);
  ::mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
}

// Reading a mapped file that was truncated, or whose disk fails, raises SIGBUS. Nothing can be
// saved here; checkpoints are complete whenever a run ends.
void end_on_bus_error(int) {
  constexpr std::string_view kText =
      "moxie: a file became shorter, or its disk failed, while it was being read; --resume goes "
      "on\n"
      "from the last checkpoint once the file is back\n";
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, kText.data(), kText.size());
  ::_exit(kFailed);
}

// Opens closed standard streams: otherwise the next opened file would become stdout or stderr, and
// printed text would be written into it.
void open_standard_files() {
  for (int fd = 0; fd <= STDERR_FILENO; ++fd)
    if (::fcntl(fd, F_GETFD) < 0) ::open("/dev/null", O_RDWR);
}

void end_at_once(int) {
  constexpr std::string_view kText = "moxie: interrupted; nothing was written\n";
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, kText.data(), kText.size());
  ::_exit(kInterrupted);
}

// Called before torch's libraries initialise themselves, which takes longer than everything else
// before the first step. train and compare, which write files, handle these signals themselves
// later. (Not sanitized, because sanitizers are not initialised yet.)
__attribute__((no_sanitize_address, no_sanitize_undefined)) void handle_early_signals() {
  for (const int number : {SIGINT, SIGTERM, SIGHUP})
    if (::signal(number, end_at_once) == SIG_IGN) ::signal(number, SIG_IGN);
}
__attribute__((section(".preinit_array"), used)) void (*const preinit)() = handle_early_signals;

void handle_signals() {
  std::signal(SIGBUS, end_on_bus_error);
  std::signal(SIGXFSZ, SIG_IGN);  // write() then fails if a file exceeds its size limit
  std::signal(SIGPIPE, SIG_IGN);  // write() then fails if a pipe has no reader; train stops then
}

int say(const std::exception& error, int code) {
  std::fprintf(stderr, "moxie: %s\n", plain(error.what()).c_str());
  return code;
}

// Prints torch's message without the C++ stack that follows its first line.
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
  // If the output could not be written, the program has failed. A closed pipe needs no message.
  errno = 0;
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  if (errno != EPIPE) std::fprintf(stderr, "moxie: cannot write to stdout\n");
  return code == moxie::cli::kDone ? moxie::cli::kFailed : code;
}
