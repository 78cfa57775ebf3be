// Who may write in a folder: the one process that holds its lock.
#pragma once

#include <string>

namespace moxie::cli {

// Error where another process has it. A killed process gives it back.
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
