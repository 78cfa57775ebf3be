// The lock of a folder: only the process that holds it may write there.
#pragma once

#include <string>

namespace moxie::cli {

// Throws Error if another process holds the lock. The system releases it when a process is killed.
class FolderLock {
 public:
  explicit FolderLock(const std::string& path);  // of the lock file
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

  // Throws IoError if the folder was moved or replaced: its path may now lead to another's folder.
  void check_folder() const;

 private:
  std::string folder_;
  int fd_, folder_fd_;
};

}  // namespace moxie::cli
