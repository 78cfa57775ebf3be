// What a checkpoint says of itself beside its tensors, and which checkpoints there are.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "moxie/cli/file/safetensors.h"
#include "moxie/cli/train/config.h"

namespace moxie::cli {

struct Position {
  int64_t step = 0;                   // steps that are done
  int64_t window = 0;                 // windows that are read
  std::string data_fingerprint = {};  // of the corpus
  double seconds = 0;                 // spent on the steps
};

struct Saved {
  Config config = {};
  Position position = {};
  std::string metrics =
      {};  // checksum of the metrics up to here; empty of a moxie before there was
};

// As metadata of a safetensors file, under this key.
inline constexpr const char* kCheckpointKey = "moxie.checkpoint";
std::string to_text(const Saved& saved);
// Error, with the path, unless the file is a checkpoint.
Saved saved_of(const std::string& path, const Safetensors& file);

// folder/step-00000100.safetensors
std::string checkpoint_path(const std::string& folder, int64_t step);
bool is_checkpoint_name(std::string_view name);

struct Checkpoint {
  std::string path;
  Saved saved = {};
  std::string checksum = {};  // what it says, not what it is: that takes to read all of it
  std::string problem = {};   // why it cannot be read; then there is nothing of the above but path
};

// By the step inside them, newest first; those that cannot be read are at the end. Of the same step
// the one whose name says so is first.
std::vector<Checkpoint> find_checkpoints(const std::string& folder);

// The step that the name says; -1 where it says none.
int64_t named_step(const std::string& path);

}  // namespace moxie::cli
