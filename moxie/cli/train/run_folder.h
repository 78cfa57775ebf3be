// The files in a run's folder. Only the process that holds the folder's lock may write them.
#pragma once

#include <string>

namespace moxie::cli {

struct RunFolder {
  std::string path;
  std::string config() const { return path + "/config.json"; }
  std::string metrics() const { return path + "/metrics.jsonl"; }
  std::string checkpoints() const { return path + "/checkpoints"; }
  std::string result() const { return path + "/result.json"; }
  std::string lock() const { return path + "/lock"; }
};

// Whether the folder contains a run: a config, metrics, a result or a checkpoint. A new run never
// overwrites such a folder.
bool holds_run(const RunFolder& folder);

// Creates the folder for checkpoints. Throws IoError if it is a link, because checkpoints would be
// written outside of the run's folder.
void make_checkpoint_folder(const RunFolder& folder);

// Removes temporary files that a killed process left. The caller must hold the lock.
void remove_unfinished_files(const RunFolder& folder);

// Whether the path, with links followed, is a file of the run or in its folder of checkpoints.
bool is_file_of_run(const RunFolder& folder, const std::string& path);
// Whether the path, with links followed, is in the run's folder.
bool is_inside(const RunFolder& folder, const std::string& path);

}  // namespace moxie::cli
