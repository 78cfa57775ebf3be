#include "moxie/cli/file/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "moxie/cli/file/error.h"

namespace moxie::cli {

MappedFile::MappedFile(const std::string& path) {
  // O_NONBLOCK, because opening a pipe would block.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) fail_io("cannot open", path, errno);
  struct stat about = {};
  int error = ::fstat(fd, &about) != 0 ? errno : 0;
  if (error == 0 && !S_ISREG(about.st_mode)) error = S_ISDIR(about.st_mode) ? EISDIR : EINVAL;
  if (error == 0 && about.st_size > 0) {  // an empty file cannot be mapped
    size_ = static_cast<size_t>(about.st_size);
    void* at = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
    if (at == MAP_FAILED)
      error = errno;
    else
      data_ = static_cast<const char*>(at);
  }
  ::close(fd);
  if (error != 0) fail_io("cannot read", path, error);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<char*>(data_), size_);
}

void MappedFile::swap(MappedFile& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
}

}  // namespace moxie::cli
