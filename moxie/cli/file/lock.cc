#include "moxie/cli/file/lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "moxie/cli/file/error.h"
#include "moxie/core/base/check.h"

namespace moxie::cli {

// O_NOFOLLOW, because through a link the file would be created outside of the folder. O_NONBLOCK,
// because opening a pipe would block.
FolderLock::FolderLock(const std::string& path)
    : folder_(std::filesystem::path(path).parent_path().string()),
      fd_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0644)),
      folder_fd_(-1) {
  if (fd_ < 0) fail_io("cannot write", path, errno);
  bool is_ours = ::flock(fd_, LOCK_EX | LOCK_NB) == 0;
  // Locks the folder itself too, as a user may remove the lock file. Some file systems cannot lock
  // folders; then the file's lock must do.
  folder_fd_ = ::open(folder_.empty() ? "." : folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (is_ours && folder_fd_ >= 0)
    is_ours = ::flock(folder_fd_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
  if (is_ours) return;
  ::close(fd_);
  if (folder_fd_ >= 0) ::close(folder_fd_);
  fail("another process trains in this folder: '", path, "' is locked");
}

FolderLock::~FolderLock() {
  ::close(fd_);
  if (folder_fd_ >= 0) ::close(folder_fd_);
}

void FolderLock::check_folder() const {
  struct stat held = {}, named = {};
  if (folder_fd_ < 0 || ::fstat(folder_fd_, &held) != 0) return;
  const bool is_there = ::stat(folder_.empty() ? "." : folder_.c_str(), &named) == 0;
  if (!is_there || held.st_dev != named.st_dev || held.st_ino != named.st_ino)
    throw IoError("cannot write '" + folder_ +
                  "': the folder was moved or replaced after the run began; --resume goes on where "
                  "it is now");
}

}  // namespace moxie::cli
