// Writes the folder of a run as `moxie train` does, without torch: two checkpoints of a few bytes,
// metrics, config and, for a finished run, the result.
#pragma once

#include <string>

#include "moxie/cli/file/atomic_file.h"
#include "moxie/cli/file/checksum.h"
#include "moxie/cli/train/run_state.h"
#include "tests/cli/folder.h"

namespace moxie::testing {

struct RunFiles {
  static constexpr int64_t kSteps = 4, kSaveEvery = 2;
  static constexpr const char* kFingerprint = "split2-0123456789abcdef";

  const Folder& folder;
  cli::RunFolder run{folder.path("run")};

  static cli::Config config() {
    cli::Config config;
    config.steps = kSteps;
    config.threads = 1;
    config.data = {"text"};
    return config;
  }

  std::string checkpoint(int64_t step) const {
    return cli::checkpoint_path(run.checkpoints(), step);
  }

  void save(int64_t step, cli::Metrics& metrics) const {
    const std::string weights(64, static_cast<char>('a' + step)), rng(16, 'r');
    const cli::Saved saved{.config = config(),
                           .position = {.step = step,
                                        .window = step * config().batch * config().accumulate,
                                        .data_fingerprint = kFingerprint,
                                        .seconds = 0.5 * static_cast<double>(step)},
                           .metrics = metrics.checksum()};
    cli::write_safetensors(
        checkpoint(step), {{cli::kCheckpointKey, to_text(saved)}},
        {{"model.w", "F32", {4, 4}, [&] { return std::string_view(weights); }},
         {"rng.cpu", "U8", {16}, [&] { return std::string_view(rng); }}},
        [&](const std::string& checksum) { metrics.note_checkpoint(step, checksum); });
  }

  enum class End { kStopped, kFinished };
  void write(End end) const {
    std::filesystem::remove_all(run.path);
    std::filesystem::create_directories(run.checkpoints());
    cli::write_file(run.config(), cli::to_json(config()).dump(2) + "\n");
    cli::Metrics metrics(run.metrics(), 0);
    for (int64_t step = 1; step <= kSteps; ++step) {
      metrics.write({{"event", "step"}, {"step", step}, {"loss", 5.5}, {"tokens_per_s", 100.25}});
      if (step % kSaveEvery == 0) save(step, metrics);
    }
    if (end == End::kStopped) return;
    const cli::Result result{.steps = kSteps,
                             .parameters = 16,
                             .eval_loss = 5.25,
                             .eval_windows = 8,
                             .bigram_entropy = 2.5,
                             .data_fingerprint = kFingerprint,
                             .tokens_per_s = 100.25,
                             .seconds = 2,
                             .peak_memory_bytes = 1 << 20,
                             .device = "cpu, 1 threads"};
    metrics.write({{"event", "eval"},
                   {"step", kSteps},
                   {"loss", result.eval_loss},
                   {"windows", result.eval_windows},
                   {"final", true}});
    const std::string text = cli::to_json(result).dump(2) + "\n";
    metrics.note_result(kSteps, text);
    cli::write_file(run.result(), text);
  }
};

// The JSON header of a safetensors file; with_header() returns the file with another header.
inline std::string header_of(const std::string& file) {
  uint64_t length;
  std::memcpy(&length, file.data(), sizeof length);
  return file.substr(sizeof length, length);
}
inline std::string with_header(const std::string& file, const std::string& header) {
  return raw_safetensors(header, file.substr(8 + header_of(file).size()));
}

// Returns the file with the right checksum for its changed bytes, as a forger would write it.
inline std::string with_checksum(std::string file) {
  const std::string field = "\"moxie.checksum\":\"";
  const size_t at = file.find(field);
  if (at == file.npos || at + field.size() + 16 > file.size()) return file;
  file.replace(at + field.size(), 16, 16, '0');
  cli::Checksum sum;
  sum.add(file);
  return file.replace(at + field.size(), 16, sum.hex());
}

}  // namespace moxie::testing
