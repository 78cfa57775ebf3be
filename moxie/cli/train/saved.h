// Reads and writes a checkpoint's metadata, and finds checkpoints.
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
  std::string data_fingerprint = {};  // fingerprint of the corpus
  double seconds = 0;                 // time that the steps took
};

struct Saved {
  Config config = {};
  Position position = {};
  std::string metrics = {};  // checksum of the metrics up to this step; empty in old files
};

// The key in a safetensors file's metadata that holds the Saved; other files do not have it.
inline constexpr const char* kCheckpointKey = "moxie.checkpoint";
std::string to_text(const Saved& saved);
// Reads the metadata of a checkpoint; throws Error, with the path, if the file is none.
Saved saved_of(const std::string& path, const Safetensors& file);

// The path of the checkpoint of a step: folder/step-00000100.safetensors.
std::string checkpoint_path(const std::string& folder, int64_t step);
bool is_checkpoint_name(std::string_view name);

struct Checkpoint {
  std::string path;
  Saved saved = {};
  std::string checksum = {};  // as the file says; not verified, which would need the whole file
  std::string problem = {};   // why it cannot be read; then only `path` is valid
};

// The checkpoints in a folder, sorted by the step inside them, newest first; those that cannot be
// read are last. Of several with the same step, the one whose name has that step is first.
std::vector<Checkpoint> find_checkpoints(const std::string& folder);

// The step in a file's name; -1 if there is none.
int64_t named_step(const std::string& path);

}  // namespace moxie::cli
