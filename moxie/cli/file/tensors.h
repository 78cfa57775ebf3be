// torch tensors in safetensors files.
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

// Tensors on a GPU are copied to the host one at a time.
void write_tensors(const std::string& path, const Metadata& metadata,
                   const std::vector<NamedTensor>& tensors, const BeforeCommit& before_commit = {});

// A read-only view of the file's bytes, or a copy if they are not aligned.
at::Tensor tensor_of(const TensorEntry& entry);

// The dtype of F8_E4M3 and so on; throws Error if torch has no such dtype.
at::ScalarType scalar_type_of(const TensorEntry& entry);

}  // namespace moxie::cli
