// Reads and writes safetensors files: 8 bytes with the length of the header, a JSON header, then
// the bytes of the tensors. Files that Moxie writes contain a checksum of everything else, which it
// verifies when it reads them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "moxie/cli/file/mapped_file.h"

namespace moxie::cli {

using Metadata = std::map<std::string, std::string>;

struct TensorEntry {
  std::string name;
  std::string dtype = {};  // as in the file: "F32", "BF16", "I64", ...
  std::vector<int64_t> shape = {};
  std::string_view bytes = {};  // where they lie in the mapped file
};

struct Safetensors {
  MappedFile file;
  Metadata metadata = {};                 // without the checksum
  std::vector<TensorEntry> tensors = {};  // in the order of their bytes in the file
  bool has_checksum = false;
  std::string checksum = {};  // as stored in the file; empty in files of other programs

  const TensorEntry* find(std::string_view name) const;
};

enum class Verify : uint8_t {
  kAll,     // header and checksum, which takes reading the whole file
  kHeader,  // only the header, and that it fits the size of the file
};

// Maps a file and reads its header. Throws Error, with the path and the reason, unless the header
// accounts for every byte.
Safetensors read_safetensors(const std::string& path, Verify verify = Verify::kAll);

struct TensorToWrite {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  // Returns the tensor's bytes when they are to be written. Called once per tensor, in the order of
  // the list; the bytes must live until the next call.
  std::function<std::string_view()> bytes;
};

// A function that is called with the checksum when the file is written but not yet renamed.
using BeforeCommit = std::function<void(const std::string& checksum)>;

// Writes a file atomically; throws IoError.
void write_safetensors(const std::string& path, const Metadata& metadata,
                       const std::vector<TensorToWrite>& tensors,
                       const BeforeCommit& before_commit = {});

// The size of an element of this dtype ("F32"); 0 if the dtype is unknown.
int64_t bytes_per_element(std::string_view dtype);

}  // namespace moxie::cli
