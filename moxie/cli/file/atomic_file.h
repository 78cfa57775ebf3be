// A file that is either complete or not there: it is written under a temporary name, flushed to the
// disk, and renamed by commit(). Without commit() it is removed. The temporary name is always new,
// so that no existing file or link is written to.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace moxie::cli {

class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path);  // everything in this header throws IoError
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile();

  void write(std::string_view bytes);
  void overwrite(uint64_t at, std::string_view bytes);
  void commit();

 private:
  void write_at(uint64_t at, std::string_view bytes);
  std::string path_, temporary_;
  int fd_ = -1;
  uint64_t size_ = 0;
};

void write_file(const std::string& path, std::string_view bytes);

// Throws IoError if write_file() would fail because of the path: its folder does not exist,
// permission is missing, or a folder has that name. Call it before long work whose result is to be
// written there.
void check_can_write(const std::string& path);

// Removes temporary files in this folder that were left by killed processes, if `is_ours` is true
// of their final name.
void remove_unfinished_files(const std::string& folder,
                             const std::function<bool(std::string_view)>& is_ours);

}  // namespace moxie::cli
