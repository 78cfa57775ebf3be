// torch's tensors in safetensors files.
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

// Tensors of a GPU come to the host one at a time.
void write_tensors(const std::string& path, const Metadata& metadata,
                   const std::vector<NamedTensor>& tensors, const BeforeCommit& before_commit = {});

// A view of the file's bytes (a copy where they are not aligned), to be read only.
at::Tensor tensor_of(const TensorEntry& entry);

// F8_E4M3 and so on; Error where torch has no such dtype.
at::ScalarType scalar_type_of(const TensorEntry& entry);

}  // namespace moxie::cli
