// A file that exists completely or not at all: it is written under a temporary name, flushed to the
// disk, and then renamed. Without commit() it is removed. The temporary name is new, so no existing
// file or link is written to.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace moxie::cli {

class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path);  // all functions here throw IoError
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

// Throws IoError if write_file() would fail because of the path: no such folder, no permission, a
// folder of that name. For checks before long work that ends with writing a file.
void check_can_write(const std::string& path);

// Removes what AtomicFiles in this folder left behind when their process was killed, if `is_ours`
// holds for their final name.
void remove_unfinished_files(const std::string& folder,
                             const std::function<bool(std::string_view)>& is_ours);

}  // namespace moxie::cli
