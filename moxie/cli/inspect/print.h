// The result of an inspection, as a table and as JSON.
#pragma once

#include <string>
#include <vector>

#include "moxie/cli/file/safetensors.h"
#include "moxie/cli/inspect/quality.h"

namespace moxie::cli {

struct InspectedTensor {
  const TensorEntry& entry;
  int64_t not_finite = 0;   // elements that are NaN or infinite
  int64_t outside_f32 = 0;  // of F64, which is measured as F32: too large or small for it
  std::vector<Quality> qualities = {};  // by recipe; empty if not measured
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
