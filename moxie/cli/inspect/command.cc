#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>
#include <fnmatch.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <optional>

#include "moxie/cli/command.h"
#include "moxie/cli/file/json.h"
#include "moxie/cli/file/tensors.h"
#include "moxie/cli/inspect/print.h"
#include "moxie/cli/terminal.h"
#include "moxie/cli/text.h"
#include "moxie/core/base/check.h"
#include "moxie/torch/recipe.h"

namespace moxie::cli {
namespace {

constexpr const char* kWhat =
    "List the tensors of a safetensors file and what recipes lose of them";
constexpr const char* kMore =
    "Examples:\n"
    "  moxie inspect model.safetensors\n"
    "  moxie inspect runs/x/checkpoints/step-00000300.safetensors --tensor 'model.*.w13'\n"
    "  moxie inspect model.safetensors --recipes mxfp8_rceil mxfp8_floor bf16\n"
    "  moxie inspect model.safetensors --json | jq '.tensors[].name'\n"
    "\n"
    "FILE comes first: --recipes and --tensor take every word that follows them. Float tensors of\n"
    "2 or 3 dims are measured as weights; docs/INSPECT.md says what the numbers mean.";

constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kManyMiB = 64;  // from this size on, progress is shown

struct Flags {
  std::string file;
  std::vector<std::string> recipes = {"mxfp8_rceil", "mxfp8_rceil_128", "fp8_rowwise"};
  std::vector<std::string> patterns;
  bool json = false;
};

bool matches(const std::string& name, const std::vector<std::string>& patterns) {
  return std::any_of(patterns.begin(), patterns.end(), [&](const std::string& pattern) {
    return ::fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
  });
}

// Throws if one of the patterns matches no tensor.
void check_patterns(const Flags& flags, const Safetensors& file) {
  std::vector<std::string_view> names;
  for (const TensorEntry& entry : file.tensors) names.push_back(entry.name);
  for (const std::string& pattern : flags.patterns)
    MOXIE_CHECK(
        std::any_of(file.tensors.begin(), file.tensors.end(),
                    [&](const TensorEntry& entry) { return matches(entry.name, {pattern}); }),
        "--tensor: '", flags.file, "' has no tensor '", pattern, "'",
        printable(did_you_mean(pattern, names)));
}

// Whether to measure a tensor as a weight. AdamW's moments are not weights: they are measured only
// if the user asks for tensors by --tensor.
bool is_measured(const TensorEntry& entry, const Flags& flags) {
  const size_t dims = entry.shape.size();
  const bool is_float =
      entry.dtype == "F32" || entry.dtype == "BF16" || entry.dtype == "F16" || entry.dtype == "F64";
  return is_float && (dims == 2 || dims == 3) && !entry.bytes.empty() &&
         !is_too_wide(entry.shape) && (!flags.patterns.empty() || !entry.name.starts_with("adam."));
}

class Inspector {
 public:
  Inspector(const Flags& flags, const Safetensors& file) : flags_(flags) {
    for (const TensorEntry& entry : file.tensors)
      if (is_listed(entry) && is_measured(entry, flags)) total_ += std::ssize(entry.bytes);
    if (total_ >= kManyMiB * kMiB) progress_.emplace("inspect", 0, mebibytes(total_), "MiB");
  }

  bool is_listed(const TensorEntry& entry) const {
    return flags_.patterns.empty() || matches(entry.name, flags_.patterns);
  }

  InspectedTensor inspect(const TensorEntry& entry) {
    InspectedTensor seen{.entry = entry};
    if (!is_measured(entry, flags_)) return seen;
    seen.qualities.resize(flags_.recipes.size());
    for_each_piece(entry, [&](const at::Tensor& piece) {
      const at::Tensor values = as_measured(piece), finite = at::isfinite(piece);
      seen.not_finite += piece.numel() - finite.sum().item<int64_t>();
      if (piece.scalar_type() == at::kDouble)
        seen.outside_f32 +=
            ((finite & at::isfinite(values).logical_not()) | ((piece != 0) & (values == 0)))
                .sum()
                .item<int64_t>();
      for (size_t i = 0; i < flags_.recipes.size(); ++i)
        seen.qualities[i].add(measure(values, flags_.recipes[i]));
      done_ += piece.numel() * bytes_per_element(entry.dtype);
      if (progress_) progress_->show(mebibytes(done_), printable(entry.name));
    });
    return seen;
  }

 private:
  // Whole MiB for the progress line. Only the final value is rounded up, so that progress reaches
  // its end, and prints its last line, once.
  int64_t mebibytes(int64_t bytes) const {
    return bytes == total_ ? (bytes + kMiB - 1) / kMiB : bytes / kMiB;
  }

  const Flags& flags_;
  std::optional<Progress> progress_;
  int64_t total_ = 0, done_ = 0;  // bytes
};

void run(const Flags& flags) {
  const at::NoGradGuard no_grad;
  for (const std::string& recipe : flags.recipes) ops::parse_recipe(recipe, "--recipes");
  const Safetensors file = read_safetensors(flags.file);
  check_patterns(flags, file);
  Inspection inspection{.path = flags.file, .file = file, .recipes = flags.recipes};
  {
    Inspector inspector(flags, file);
    for (const TensorEntry& entry : file.tensors)
      if (inspector.is_listed(entry)) inspection.tensors.push_back(inspector.inspect(entry));
  }
  const std::string text = flags.json ? to_json(inspection) : to_text(inspection);
  std::fwrite(text.data(), 1, text.size(), stdout);
}

}  // namespace

void add_inspect(CLI::App& app) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("inspect", kWhat);
  command->footer(kMore);
  command->add_option("FILE", flags->file, "a checkpoint, or any safetensors file")
      ->required()
      ->type_name("");
  command
      ->add_option("--recipes", flags->recipes,
                   "what to measure with [mxfp8_rceil mxfp8_rceil_128 fp8_rowwise]")
      ->type_name("NAME");
  command
      ->add_option("--tensor", flags->patterns,
                   "only tensors of this name; * stands for anything, ? for one letter; adam.* "
                   "too, which is\nlisted but not measured otherwise")
      ->type_name("PATTERN");
  command->add_flag("--json", flags->json, "print JSON");
  command->callback([flags] { run(*flags); });
}

}  // namespace moxie::cli
