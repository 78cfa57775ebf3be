// The files of a run, by name. Whoever holds the lock may write them, and nobody else.
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

// Whether anything of a run is there: its config, metrics, result or a checkpoint. Such a folder is
// never written over.
bool holds_run(const RunFolder& folder);

// Makes the folder of the checkpoints. IoError where it is a link: what is written would be outside
// of the run's folder.
void make_checkpoint_folder(const RunFolder& folder);

// What a process that was killed left half written. For the holder of the lock.
void remove_unfinished_files(const RunFolder& folder);

// Whether the path is a file of the run, or lies among its checkpoints, links followed.
bool is_file_of_run(const RunFolder& folder, const std::string& path);
// Whether it lies in the run's folder, links followed.
bool is_inside(const RunFolder& folder, const std::string& path);

}  // namespace moxie::cli
