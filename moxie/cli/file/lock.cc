#include "moxie/cli/file/lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>

#include "moxie/cli/file/error.h"
#include "moxie/core/base/check.h"

namespace moxie::cli {

// O_NOFOLLOW: through a link, the file would be created outside of the folder. O_NONBLOCK: opening
// a pipe would block.
FolderLock::FolderLock(const std::string& path)
    : fd_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0644)) {
  if (fd_ < 0) fail_io("cannot write", path, errno);
  if (::flock(fd_, LOCK_EX | LOCK_NB) == 0) return;
  ::close(fd_);
  fail("another process trains in this folder: '", path, "' is locked");
}

FolderLock::~FolderLock() { ::close(fd_); }

}  // namespace moxie::cli
