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
using Json = nlohmann::ordered_json;

constexpr const char* kKey = "moxie.checkpoint";
constexpr std::string_view kPrefix = "step-", kSuffix = ".safetensors";
constexpr uint64_t kTooMany = uint64_t{1} << 62;  // steps or windows: more would overflow
constexpr int kDigits = 8;                        // so that names sort as steps do

std::string path_of(const std::string& folder, int64_t step) {
  std::string digits = std::to_string(step);
  digits.insert(0, static_cast<size_t>(std::max<int64_t>(0, kDigits - std::ssize(digits))), '0');
  return (fs::path(folder) / (std::string(kPrefix) + digits + std::string(kSuffix))).string();
}

// Every tensor of a checkpoint under its name.
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

Json position_json(const Position& position) {
  return {{"step", position.step},
          {"window", position.window},
          {"data_fingerprint", position.data_fingerprint},
          {"seconds", position.seconds}};
}

Saved parse_header(const std::string& path, const Safetensors& file) {
  const auto found = file.metadata.find(kKey);
  MOXIE_CHECK(found != file.metadata.end() && file.has_checksum, "'", path,
              "' is no checkpoint of moxie train");
  try {
    const Json json = Json::parse(found->second);
    const Json& at = json.at("position");
    Saved saved{.config = saved_config(json.at("config"), "'" + path + "'"),
                .position = {.step = at.at("step"),
                             .window = at.at("window"),
                             .data_fingerprint = at.at("data_fingerprint"),
                             .seconds = at.at("seconds")}};
    const auto is_count = [&](const char* name) {
      return at.at(name).is_number_unsigned() && at.at(name).get<uint64_t>() < kTooMany;
    };
    MOXIE_CHECK(is_count("step") && is_count("window"), "'", path,
                "': its step or window is none: ", printable(at.dump()));
    return saved;
  } catch (const nlohmann::json::exception& error) {
    fail("'", path, "' is no checkpoint of this version of moxie: ", error.what());
  }
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

}  // namespace

std::string save_checkpoint(const std::string& folder, const Config& config,
                            const Position& position, const State& state) {
  const std::string path = path_of(folder, position.step);
  const Json about = {{"config", to_json(config)}, {"position", position_json(position)}};
  std::vector<NamedTensor> tensors = tensors_of(state);
  tensors.push_back({"rng.cpu", at::globalContext().defaultGenerator(at::kCPU).get_state()});
  write_tensors(path, {{kKey, about.dump()}}, tensors);
  const std::vector<std::string> all = find_checkpoints(folder);
  for (size_t i = static_cast<size_t>(config.keep); i < all.size(); ++i) fs::remove(all[i]);
  return path;
}

std::vector<std::string> find_checkpoints(const std::string& folder) {
  std::vector<std::string> paths;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(kPrefix) && name.ends_with(kSuffix))
      paths.push_back(entry.path().string());
  }
  std::sort(paths.rbegin(), paths.rend());
  return paths;
}

Saved read_checkpoint_header(const std::string& path) {
  return parse_header(path, read_safetensors(path));
}

Position load_checkpoint(const std::string& path, const State& state) {
  const at::NoGradGuard no_grad;
  const Safetensors file = read_safetensors(path);
  const Saved saved = parse_header(path, file);
  const std::vector<NamedTensor> tensors = tensors_of(state);
  for (const NamedTensor& tensor : tensors)
    MOXIE_CHECK(scalar_type_of(entry_of(path, file, tensor)) == tensor.tensor.scalar_type(), "'",
                path, "': tensor '", tensor.name, "' must be ", tensor.tensor.scalar_type(),
                ", got ", file.find(tensor.name)->dtype);
  const TensorEntry* rng = file.find("rng.cpu");
  MOXIE_CHECK(rng != nullptr && file.tensors.size() == tensors.size() + 1, "'", path,
              "' must hold ", tensors.size() + 1, " tensors, those of the model, got ",
              file.tensors.size());
  for (const NamedTensor& tensor : tensors) tensor.tensor.copy_(tensor_of(*file.find(tensor.name)));
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  try {
    generator.set_state(tensor_of(*rng));
  } catch (const c10::Error& error) {
    fail("'", path, "': rng.cpu is no random state: ", error.what_without_backtrace());
  }
  state.optimizer.write_weights();
  return saved.position;
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
  const bool is_checkpoint = file.metadata.contains(kKey);
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
                  "'", path, "': the model has no tensor '", entry.name, "'");
  for (const auto& [to, entry] : copies) {
    const at::Tensor from = tensor_of(*entry);
    MOXIE_CHECK(from.is_floating_point(), "'", path, "': tensor '", entry->name,
                "' must have a float dtype, got ", entry->dtype);
    to.copy_(from);
  }
  state.optimizer.write_weights();
}

void check_weights_path(const std::string& path, const std::vector<std::string>& taken) {
  namespace fs = std::filesystem;
  std::error_code error;
  for (const std::string& other : taken)
    MOXIE_CHECK(fs::weakly_canonical(path, error) != fs::weakly_canonical(other, error),
                "--save-weights: '", path, "' is a file of the run itself");
  check_can_write(path);
}

}  // namespace moxie::cli
