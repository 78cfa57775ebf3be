// A file that is there whole or not at all: it is written under another name, flushed to the disk,
// and then takes its name in one step. Without commit() nothing remains of it. The other name is
// one that nobody has: no file and no link of the user's is written to.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace moxie::cli {

class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path);  // everything here throws IoError
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

// IoError where write_file() would fail because of the path: no such folder, no right to write
// there, a folder of that name. For work that takes long and ends with a file.
void check_can_write(const std::string& path);

// What an AtomicFile in this folder left behind when its process was killed, if it was to become a
// file for whose name `is_ours` holds.
void remove_unfinished_files(const std::string& folder,
                             const std::function<bool(std::string_view)>& is_ours);

}  // namespace moxie::cli
