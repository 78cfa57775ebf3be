// A read-only memory-mapped file.
#pragma once

#include <string>
#include <string_view>

namespace moxie::cli {

class MappedFile {
 public:
  MappedFile() = default;
  explicit MappedFile(const std::string& path);  // throws IoError
  MappedFile(MappedFile&& other) noexcept { swap(other); }
  MappedFile& operator=(MappedFile&& other) noexcept {
    swap(other);
    return *this;
  }
  ~MappedFile();

  std::string_view bytes() const { return {data_, size_}; }

 private:
  void swap(MappedFile& other) noexcept;
  const char* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace moxie::cli
