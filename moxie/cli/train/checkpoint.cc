#include "moxie/cli/train/checkpoint.h"

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <filesystem>

#include "moxie/cli/file/atomic_file.h"
#include "moxie/cli/file/json.h"
#include "moxie/cli/file/safetensors.h"
#include "moxie/cli/file/tensors.h"
#include "moxie/core/base/check.h"

namespace moxie::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRandom = "rng.cpu";

// Names and tensors of a checkpoint, except for the state of the random generator.
std::vector<NamedTensor> tensors_of(const State& state) {
  std::vector<NamedTensor> tensors;
  for (const Weight& weight : state.optimizer.weights()) {
    tensors.push_back({"model." + weight.name, weight.master});
    tensors.push_back({"adam.mean." + weight.name, weight.mean});
    tensors.push_back({"adam.square." + weight.name, weight.square});
  }
  for (const auto& item : state.model.named_buffers())
    tensors.push_back({"buffer." + item.key(), item.value()});
  return tensors;
}

const TensorEntry& entry_of(const std::string& path, const Safetensors& file,
                            const NamedTensor& tensor) {
  const TensorEntry* entry = file.find(tensor.name);
  MOXIE_CHECK(entry != nullptr, "'", path, "' has no tensor '", tensor.name, "'");
  MOXIE_CHECK(at::IntArrayRef(entry->shape) == tensor.tensor.sizes(), "'", path, "': tensor '",
              tensor.name, "' must be ", tensor.tensor.sizes(), ", got ",
              at::IntArrayRef(entry->shape));
  return *entry;
}

// Checks names, shapes and dtypes of a file's tensors by its header, so that a file that does not
// fit is refused without reading all of it for its checksum.
void check_tensors(const std::string& path, const Safetensors& file,
                   const std::vector<NamedTensor>& tensors) {
  for (const NamedTensor& tensor : tensors)
    MOXIE_CHECK(scalar_type_of(entry_of(path, file, tensor)) == tensor.tensor.scalar_type(), "'",
                path, "': tensor '", tensor.name, "' must be ", tensor.tensor.scalar_type(),
                ", got ", file.find(tensor.name)->dtype);
  MOXIE_CHECK(file.find(kRandom) != nullptr && file.tensors.size() == tensors.size() + 1, "'", path,
              "' must hold ", tensors.size() + 1, " tensors, those of the model, got ",
              file.tensors.size());
}

}  // namespace

std::string save_checkpoint(const std::string& folder, const Saved& saved, const State& state,
                            const BeforeCommit& before_commit) {
  const std::string path = checkpoint_path(folder, saved.position.step);
  std::vector<NamedTensor> tensors = tensors_of(state);
  tensors.push_back({kRandom, at::globalContext().defaultGenerator(at::kCPU).get_state()});
  write_tensors(path, {{kCheckpointKey, to_text(saved)}}, tensors, before_commit);
  int64_t kept = 0;
  for (const Checkpoint& checkpoint : find_checkpoints(folder)) {
    // A checkpoint whose name does not fit its step was renamed by the user, and is kept. So is one
    // that cannot be read.
    const int64_t step = checkpoint.saved.position.step;
    if (!checkpoint.problem.empty() || named_step(checkpoint.path) != step) continue;
    if (++kept > saved.config.keep) fs::remove(checkpoint.path);
  }
  return path;
}

Position load_checkpoint(const std::string& path, const State& state) {
  const at::NoGradGuard no_grad;
  const std::vector<NamedTensor> tensors = tensors_of(state);
  check_tensors(path, read_safetensors(path, Verify::kHeader), tensors);
  const Safetensors file = read_safetensors(path);
  check_tensors(path, file, tensors);
  for (const NamedTensor& tensor : tensors) tensor.tensor.copy_(tensor_of(*file.find(tensor.name)));
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  try {
    generator.set_state(tensor_of(*file.find(kRandom)));
  } catch (const c10::Error& error) {
    fail("'", path, "': rng.cpu is no random state: ", error.what_without_backtrace());
  }
  state.optimizer.write_weights();
  return saved_of(path, file).position;
}

void save_weights(const std::string& path, const State& state) {
  std::vector<NamedTensor> tensors;
  for (const Weight& weight : state.optimizer.weights())
    tensors.push_back({weight.name, weight.master});
  for (const auto& item : state.model.named_buffers())
    if (item.value().is_floating_point()) tensors.push_back({item.key(), item.value()});
  write_tensors(path, {}, tensors);
}

void load_weights(const std::string& path, const State& state) {
  const at::NoGradGuard no_grad;
  const Safetensors file = read_safetensors(path);
  const bool is_checkpoint = file.metadata.contains(kCheckpointKey);
  std::vector<std::pair<at::Tensor, const TensorEntry*>> copies;
  for (const Weight& weight : state.optimizer.weights())
    copies.emplace_back(
        weight.master,
        &entry_of(path, file, {(is_checkpoint ? "model." : "") + weight.name, weight.master}));
  for (const auto& item : state.model.named_buffers()) {
    const std::string name = (is_checkpoint ? "buffer." : "") + item.key();
    if (item.value().is_floating_point() && file.find(name) != nullptr)
      copies.emplace_back(item.value(), &entry_of(path, file, {name, item.value()}));
  }
  if (!is_checkpoint)
    for (const TensorEntry& entry : file.tensors)
      MOXIE_CHECK(std::any_of(copies.begin(), copies.end(),
                              [&](const auto& copy) { return copy.second == &entry; }),
                  "'", path, "': the model has no tensor '", printable(entry.name), "'");
  for (const auto& [to, entry] : copies) {
    const at::Tensor from = tensor_of(*entry);
    MOXIE_CHECK(from.is_floating_point(), "'", path, "': tensor '", entry->name,
                "' must have a float dtype, got ", entry->dtype);
    to.copy_(from);
  }
  state.optimizer.write_weights();
}

void check_weights_path(const std::string& path, const RunFolder& folder) {
  MOXIE_CHECK(!is_file_of_run(folder, path), "--save-weights: '", path,
              "' is a file of the run itself");
  check_can_write(path);
}

}  // namespace moxie::cli
