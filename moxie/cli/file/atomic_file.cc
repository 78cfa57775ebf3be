#include "moxie/cli/file/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <filesystem>
#include <random>

#include "moxie/cli/file/error.h"

namespace moxie::cli {
namespace {

// The temporary name of "x" is "x.a1b2c3.unfinished", with random letters and digits.
constexpr std::string_view kUnfinished = ".unfinished";
constexpr size_t kLetters = 6;

struct Temporary {
  std::string path;
  int fd;
};

// Creates a new file. O_EXCL makes open() fail if the name exists, so that no file is overwritten
// and no link is followed.
Temporary make_temporary(const std::string& path) {
  constexpr std::string_view kAlphabet = "0123456789abcdefghijklmnopqrstuvwxyz";
  constexpr int kTries = 100;
  std::random_device random;
  for (int i = 0; i < kTries; ++i) {
    std::string name = path + ".";
    for (size_t k = 0; k < kLetters; ++k) name += kAlphabet[random() % kAlphabet.size()];
    name += kUnfinished;
    const int fd = ::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd >= 0) return {name, fd};
    if (errno != EEXIST) fail_io("cannot write", path, errno);
  }
  fail_io("cannot write", path, EEXIST);
}

// The final name of an unfinished file; empty if it is not one. Earlier versions wrote
// "x.unfinished", without random letters.
std::string_view finished_name(std::string_view name) {
  if (!name.ends_with(kUnfinished)) return {};
  name.remove_suffix(kUnfinished.size());
  const size_t dot = name.rfind('.');
  const bool has_letters =
      dot != name.npos && name.size() - dot - 1 == kLetters &&
      std::all_of(name.begin() + static_cast<ptrdiff_t>(dot) + 1, name.end(), [](char c) {
        return std::isdigit(static_cast<unsigned char>(c)) != 0 || (c >= 'a' && c <= 'z');
      });
  return has_letters ? name.substr(0, dot) : name;
}

// Flushes the folder of a renamed file: only then does the rename survive a power failure.
void sync_folder_of(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  const std::string folder = parent.empty() ? "." : parent;
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) fail_io("cannot open folder", folder, errno);
  const int error = ::fsync(fd) != 0 ? errno : 0;
  ::close(fd);
  if (error != 0 && error != EINVAL) fail_io("cannot write", path, error);  // EINVAL: not supported
}

}  // namespace

AtomicFile::AtomicFile(const std::string& path) : path_(path) {
  Temporary made = make_temporary(path);
  temporary_ = std::move(made.path);
  fd_ = made.fd;
}

AtomicFile::~AtomicFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(temporary_.c_str());
}

void AtomicFile::write_at(uint64_t at, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(at));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail_io("cannot write", path_, errno);
    bytes.remove_prefix(static_cast<size_t>(written));
    at += static_cast<uint64_t>(written);
  }
}

void AtomicFile::write(std::string_view bytes) {
  write_at(size_, bytes);
  size_ += bytes.size();
}

void AtomicFile::overwrite(uint64_t at, std::string_view bytes) { write_at(at, bytes); }

void AtomicFile::commit() {
  if (::fsync(fd_) != 0) fail_io("cannot write", path_, errno);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail_io("cannot write", path_, errno);
  ::close(fd_);
  fd_ = -1;
  sync_folder_of(path_);
}

void write_file(const std::string& path, std::string_view bytes) {
  AtomicFile file(path);
  file.write(bytes);
  file.commit();
}

void check_can_write(const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) fail_io("cannot write", path, EISDIR);
  const auto status = std::filesystem::symlink_status(path, error);
  // write_file() would replace a device, a pipe or a link by a file, when it renames.
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status))
    throw IoError("cannot write '" + path + "': it is no regular file");
  const Temporary made = make_temporary(path);
  ::close(made.fd);
  ::unlink(made.path.c_str());
}

void remove_unfinished_files(const std::string& folder,
                             const std::function<bool(std::string_view)>& is_ours) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    const std::string_view finished = finished_name(name);
    if (!finished.empty() && is_ours(finished)) ::unlink(entry.path().c_str());
  }
}

}  // namespace moxie::cli
