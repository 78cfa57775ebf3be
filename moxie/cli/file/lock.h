// The lock of a folder: only the process that holds it may write there.
#pragma once

#include <string>

namespace moxie::cli {

// Throws Error if another process holds the lock. The system releases it when a process is killed.
class FolderLock {
 public:
  explicit FolderLock(const std::string& path);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  int fd_;
};

}  // namespace moxie::cli
