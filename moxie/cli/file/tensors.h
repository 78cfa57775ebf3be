// Reads and writes safetensors files as torch tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "moxie/cli/file/safetensors.h"

namespace moxie::cli {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

// Writes a file. Tensors on a GPU are copied to the host one at a time, to save memory.
void write_tensors(const std::string& path, const Metadata& metadata,
                   const std::vector<NamedTensor>& tensors, const BeforeCommit& before_commit = {});

// A tensor of a file: a view of the mapped bytes, which must not be written to, or a copy if they
// are not aligned.
at::Tensor tensor_of(const TensorEntry& entry);

// torch's dtype for the file's ("F8_E4M3" ..); throws Error if torch has none.
at::ScalarType scalar_type_of(const TensorEntry& entry);

}  // namespace moxie::cli
