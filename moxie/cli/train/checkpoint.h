// Writes and reads checkpoints. One is a safetensors file with the master weights, AdamW's moments,
// buffers, the state of the random generator, and metadata (saved.h).
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

// Writes a checkpoint, say folder/step-00000100.safetensors, then removes the oldest ones so that
// `keep` (of the config) are left. Returns its path.
std::string save_checkpoint(const std::string& folder, const Saved& saved, const State& state,
                            const BeforeCommit& before_commit);

// Loads a checkpoint into a model with the same config. If a tensor does not fit, throws Error with
// its name, before anything is changed.
Position load_checkpoint(const std::string& path, const State& state);

// Writes the weights and float buffers, without AdamW's state, under the model's names; weights are
// float32.
void save_weights(const std::string& path, const State& state);
// Throws Error if save_weights() would fail because of the path, or would overwrite a file of the
// run.
void check_weights_path(const std::string& path, const RunFolder& folder);
// Loads weights of any float dtype from a file of save_weights(), or from a checkpoint.
void load_weights(const std::string& path, const State& state);

}  // namespace moxie::cli
