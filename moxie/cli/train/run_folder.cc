#include "moxie/cli/train/run_folder.h"

#include <algorithm>
#include <filesystem>

#include "moxie/cli/file/atomic_file.h"
#include "moxie/cli/file/error.h"
#include "moxie/cli/train/saved.h"

namespace moxie::cli {
namespace {

namespace fs = std::filesystem;

fs::path canonical(const std::string& path) {
  std::error_code error;
  const fs::path absolute = fs::absolute(path, error);
  const fs::path found = fs::weakly_canonical(absolute, error);
  return error ? absolute.lexically_normal() : found;
}

bool is_below(const fs::path& folder, const fs::path& path) {
  return std::mismatch(folder.begin(), folder.end(), path.begin(), path.end()).first ==
         folder.end();
}

}  // namespace

bool holds_run(const RunFolder& folder) {
  std::error_code error;
  for (const std::string& path : {folder.config(), folder.metrics(), folder.result()})
    if (fs::exists(fs::symlink_status(path, error))) return true;
  for (const auto& entry : fs::directory_iterator(folder.checkpoints(), error))
    if (is_checkpoint_name(entry.path().filename().string())) return true;
  return false;
}

void make_checkpoint_folder(const RunFolder& folder) {
  std::error_code error;
  if (fs::is_symlink(fs::symlink_status(folder.checkpoints(), error)))
    throw IoError("cannot write '" + folder.checkpoints() +
                  "': it is a link, and a run writes inside its own folder alone");
  fs::create_directories(folder.checkpoints());
}

void remove_unfinished_files(const RunFolder& folder) {
  remove_unfinished_files(folder.path, [](std::string_view name) {
    return name == "config.json" || name == "metrics.jsonl" || name == "result.json";
  });
  remove_unfinished_files(folder.checkpoints(), is_checkpoint_name);
}

bool is_file_of_run(const RunFolder& folder, const std::string& path) {
  const fs::path asked = canonical(path);
  for (const std::string& taken :
       {folder.config(), folder.metrics(), folder.result(), folder.lock()})
    if (asked == canonical(taken)) return true;
  return is_below(canonical(folder.checkpoints()), asked);
}

bool is_inside(const RunFolder& folder, const std::string& path) {
  return is_below(canonical(folder.path), canonical(path));
}

}  // namespace moxie::cli
