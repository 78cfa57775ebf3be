// The metadata of a checkpoint, and finding checkpoints.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "moxie/cli/file/safetensors.h"
#include "moxie/cli/train/config.h"

namespace moxie::cli {

struct Position {
  int64_t step = 0;                   // steps done
  int64_t window = 0;                 // windows read
  std::string data_fingerprint = {};  // of the corpus
  double seconds = 0;                 // spent on the steps
};

struct Saved {
  Config config = {};
  Position position = {};
  std::string metrics = {};  // checksum of the metrics up to here; empty in old files
};

// The key in the metadata of a safetensors file.
inline constexpr const char* kCheckpointKey = "moxie.checkpoint";
std::string to_text(const Saved& saved);
// Throws Error, with the path, if the file is not a checkpoint.
Saved saved_of(const std::string& path, const Safetensors& file);

// folder/step-00000100.safetensors
std::string checkpoint_path(const std::string& folder, int64_t step);
bool is_checkpoint_name(std::string_view name);

struct Checkpoint {
  std::string path;
  Saved saved = {};
  std::string checksum = {};  // as stored; not verified, which would read the whole file
  std::string problem = {};   // why it cannot be read; then only `path` is valid
};

// Sorted by the step inside them, newest first; those that cannot be read are last. Of several with
// the same step, the one with that step in its name is first.
std::vector<Checkpoint> find_checkpoints(const std::string& folder);

// The step in the file's name; -1 if it has none.
int64_t named_step(const std::string& path);

}  // namespace moxie::cli
