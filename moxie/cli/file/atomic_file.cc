#include "moxie/cli/file/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>

#include "moxie/cli/file/error.h"

namespace moxie::cli {
namespace {

constexpr std::string_view kUnfinished = ".unfinished";

// A name is on the disk only once its folder is.
void sync_folder_of(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  const std::string folder = parent.empty() ? "." : parent;
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) fail_io("cannot open folder", folder, errno);
  const int error = ::fsync(fd) != 0 ? errno : 0;
  ::close(fd);
  if (error != 0 && error != EINVAL) fail_io("cannot write", path, error);  // EINVAL: no such thing
}

}  // namespace

AtomicFile::AtomicFile(const std::string& path)
    : path_(path), temporary_(path + std::string(kUnfinished)) {
  fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd_ < 0) fail_io("cannot write", path, errno);
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
  // A rename would put a file in the place of a device, a pipe or a link.
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status))
    throw IoError("cannot write '" + path + "': it is no regular file");
  std::string name = path + ".try-XXXXXX";  // as long as the name of an unfinished file
  const int fd = ::mkstemp(name.data());
  if (fd < 0) fail_io("cannot write", path, errno);
  ::close(fd);
  ::unlink(name.c_str());
}

void remove_unfinished_files(const std::string& folder) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error))
    if (entry.path().string().ends_with(kUnfinished)) std::filesystem::remove(entry.path(), error);
}

}  // namespace moxie::cli
