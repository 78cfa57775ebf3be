// Prints the result of an inspection, as a table or as JSON.
#pragma once

#include <string>
#include <vector>

#include "moxie/cli/file/safetensors.h"
#include "moxie/cli/inspect/quality.h"

namespace moxie::cli {

struct InspectedTensor {
  const TensorEntry& entry;
  int64_t not_finite = 0;   // elements that are NaN or infinite
  int64_t outside_f32 = 0;  // F64 elements beyond the range of F32, in which they are measured
  std::vector<Quality> qualities = {};  // one per recipe; empty if not measured
};

struct Inspection {
  std::string path;
  const Safetensors& file;
  std::vector<std::string> recipes;
  std::vector<InspectedTensor> tensors = {};
};

std::string to_text(const Inspection& inspection);
std::string to_json(const Inspection& inspection);

}  // namespace moxie::cli
