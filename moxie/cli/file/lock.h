// Locks a folder, so that only one process writes there.
#pragma once

#include <string>

namespace moxie::cli {

// The constructor throws Error if another process holds the lock. The system releases the lock of a
// process that is killed.
class FolderLock {
 public:
  explicit FolderLock(const std::string& path);  // path of the lock file
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

  // Throws IoError if the folder was moved or replaced since it was locked: its path may now lead
  // to a folder that another process uses.
  void check_folder() const;

 private:
  std::string folder_;
  int fd_, folder_fd_;
};

}  // namespace moxie::cli
