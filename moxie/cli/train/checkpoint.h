// A checkpoint is one safetensors file: master weights, AdamW's moments, buffers, the state of the
// random numbers, and as metadata the step, the config and the data's fingerprint.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "moxie/cli/train/config.h"
#include "moxie/cli/train/model.h"
#include "moxie/cli/train/optimizer.h"

namespace moxie::cli {

struct Position {
  int64_t step = 0;              // steps that are done
  int64_t window = 0;            // windows that are read
  std::string data_fingerprint;  // of the corpus
  double seconds = 0;            // spent on the steps
};

struct State {
  LanguageModelImpl& model;
  AdamW& optimizer;
};

// folder/step-00000100.safetensors; then the oldest above `keep` are removed.
std::string save_checkpoint(const std::string& folder, const Config& config,
                            const Position& position, const State& state);

// Newest first.
std::vector<std::string> find_checkpoints(const std::string& folder);

// What was trained and how far, without its tensors. Error unless the file is a whole checkpoint.
struct Saved {
  Config config;
  Position position;
};
Saved read_checkpoint_header(const std::string& path);
// Into a model of the same config. Error, with the first tensor that does not fit, before anything
// changes.
Position load_checkpoint(const std::string& path, const State& state);

// The weights alone, float32, under the model's own names.
void save_weights(const std::string& path, const State& state);
// Error where that would fail because of the path, or replace one of `taken`.
void check_weights_path(const std::string& path, const std::vector<std::string>& taken);
// From a file of save_weights(), or a checkpoint; any float dtype.
void load_weights(const std::string& path, const State& state);

}  // namespace moxie::cli
