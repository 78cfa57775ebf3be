#include <cstdio>
#include <filesystem>
#include <memory>

#include "moxie/cli/command.h"
#include "moxie/cli/text.h"
#include "moxie/cli/train/flags.h"
#include "moxie/cli/train/loop.h"
#include "moxie/core/base/check.h"

namespace moxie::cli {
namespace {

constexpr const char* kWhat = "Train a mixture-of-experts language model in MXFP8 or bf16";
constexpr const char* kMore =
    "Examples:\n"
    "  moxie train                                     the tiny preset on Python's own sources\n"
    "  moxie train --data notes/ --recipe bf16         your text, without quantization\n"
    "  moxie train --recipe experts=mxfp8_rceil_128    the experts alone in MXFP8\n"
    "  moxie train --resume --out runs/x               go on after a kill, a crash or Ctrl-C\n"
    "\n"
    "The folder of a run holds config.json, metrics.jsonl (a line per event), checkpoints/ and, "
    "at\n"
    "the end, result.json. docs/TRAIN.md says more.";

struct Flags {
  ConfigFlags config;
  bool resume = false;
  bool json = false;
};

// A run goes on with the config it began with; only what does not change its numbers may differ.
Config resumed_config(const ConfigFlags& flags, const std::string& folder) {
  const std::string path = RunFolder{folder}.config();
  MOXIE_CHECK(std::filesystem::exists(path), "--resume: '", folder,
              "' holds no run: there is no config.json");
  const Config saved = read_saved_config(path);
  const Config config = flags.resumed(saved);
  for (const Field& field : fields()) {
    if (field.part == Part::kRun || field.name == "steps") continue;
    std::visit(
        [&](const auto member) {
          MOXIE_CHECK(config.*member == saved.*member, "--resume: ", field.flag(),
                      " is not what the run in '", folder, "' began with; start another run");
        },
        field.member);
  }
  return config;
}

void print(const Result& result, const Config& config) {
  std::printf("%s\n", config.out.c_str());
  Table table({"held-out loss", "bigram entropy", "tokens/s", "time", "peak memory"});
  table.add({fixed(result.eval_loss, 4), fixed(result.bigram_entropy, 4),
             human_count(result.tokens_per_s), human_time(result.seconds),
             human_bytes(static_cast<double>(result.peak_memory_bytes))});
  std::printf("%s", table.text().c_str());
}

void run(const Flags& flags) {
  Config config = flags.config.config();
  if (config.out.empty()) config.out = default_run_folder(config);
  if (flags.resume) {
    const std::string out = config.out;
    const bool weights_asked_for = !config.save_weights.empty();
    config = resumed_config(flags.config, out);
    config.out = out;
    // A run that is finished has written them once.
    if (!weights_asked_for && finished_result(RunFolder{out}.result(), config.steps))
      config.save_weights.clear();
  }
  const Result result = train(config, flags.resume ? Start::kResume : Start::kFresh);
  if (flags.json)
    std::printf("%s\n", to_json(result).dump().c_str());
  else
    print(result, config);
}

}  // namespace

void add_train(CLI::App& app) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("train", kWhat);
  command->footer(kMore);
  command->add_flag("--resume", flags->resume, "go on from the newest checkpoint in --out");
  command->add_flag("--json", flags->json, "print the result as JSON");
  add_config_flags(*command, flags->config);
  command->callback([flags] { run(*flags); });
}

}  // namespace moxie::cli
