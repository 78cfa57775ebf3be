// A checkpoint is one safetensors file: master weights, AdamW's moments, buffers, the state of the
// random numbers, and as metadata what saved.h says.
#pragma once

#include <string>

#include "moxie/cli/train/model.h"
#include "moxie/cli/train/optimizer.h"
#include "moxie/cli/train/run_folder.h"
#include "moxie/cli/train/saved.h"

namespace moxie::cli {

struct State {
  LanguageModelImpl& model;
  AdamW& optimizer;
};

// folder/step-00000100.safetensors; then the oldest above `keep` are removed.
std::string save_checkpoint(const std::string& folder, const Saved& saved, const State& state,
                            const BeforeCommit& before_commit);

// Into a model of the same config. Error, with the first tensor that does not fit, before anything
// changes.
Position load_checkpoint(const std::string& path, const State& state);

// The weights alone, float32, under the model's own names.
void save_weights(const std::string& path, const State& state);
// Error where that would fail because of the path, or replace a file of the run.
void check_weights_path(const std::string& path, const RunFolder& folder);
// From a file of save_weights(), or a checkpoint; any float dtype.
void load_weights(const std::string& path, const State& state);

}  // namespace moxie::cli
