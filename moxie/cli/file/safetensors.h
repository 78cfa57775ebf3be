// safetensors files: 8 bytes of header length, a JSON header, the bytes of the tensors. Those that
// are written here carry a checksum of everything else, and reading them checks it.
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
  std::string dtype = {};  // safetensors' word: "F32", "BF16", "I64" ..
  std::vector<int64_t> shape = {};
  std::string_view bytes = {};  // inside the file
};

struct Safetensors {
  MappedFile file;
  Metadata metadata = {};                 // without the checksum
  std::vector<TensorEntry> tensors = {};  // in the order of their bytes
  bool has_checksum = false;
  std::string checksum = {};  // what it says of itself; empty in files of others

  const TensorEntry* find(std::string_view name) const;
};

enum class Verify : uint8_t {
  kAll,     // the checksum too, which reads the whole file
  kHeader,  // what the header says, and that it fits the size of the file
};

// Throws Error, with the path and what is wrong, unless every byte is accounted for.
Safetensors read_safetensors(const std::string& path, Verify verify = Verify::kAll);

struct TensorToWrite {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  // Called once, in the order of the list; the bytes must live until the next call.
  std::function<std::string_view()> bytes;
};

// Called with the checksum when the file is written but has not taken its name yet.
using BeforeCommit = std::function<void(const std::string& checksum)>;

// Atomically; throws IoError.
void write_safetensors(const std::string& path, const Metadata& metadata,
                       const std::vector<TensorToWrite>& tensors,
                       const BeforeCommit& before_commit = {});

// 0 for a word that is no dtype.
int64_t bytes_per_element(std::string_view dtype);

}  // namespace moxie::cli
