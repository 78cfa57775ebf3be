// A checkpoint is one safetensors file: master weights, AdamW's moments, buffers, the state of the
// random generator, and metadata (saved.h).
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

// Writes folder/step-00000100.safetensors, then removes the oldest checkpoints, except for `keep`.
std::string save_checkpoint(const std::string& folder, const Saved& saved, const State& state,
                            const BeforeCommit& before_commit);

// Loads a checkpoint into a model of the same config. Throws Error, naming the first tensor that
// does not fit, before anything is changed.
Position load_checkpoint(const std::string& path, const State& state);

// Writes only the weights, in float32, under the model's names.
void save_weights(const std::string& path, const State& state);
// Throws Error if that would fail because of the path, or overwrite a file of the run.
void check_weights_path(const std::string& path, const RunFolder& folder);
// Loads weights from a file of save_weights() or a checkpoint; any float dtype.
void load_weights(const std::string& path, const State& state);

}  // namespace moxie::cli
