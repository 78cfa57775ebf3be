#include <cstdio>
#include <filesystem>
#include <memory>

#include "moxie/cli/command.h"
#include "moxie/cli/text.h"
#include "moxie/cli/train/flags.h"
#include "moxie/cli/train/loop.h"
#include "moxie/cli/train/machine.h"
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

// The config of a resumed run. It is the saved one: only `steps`, and fields that do not change
// results, may differ.
Config resumed_config(const ConfigFlags& flags, const Config& saved, const std::string& folder) {
  Config config = flags.resumed(saved);
  for (const Field& field : fields()) {
    if (field.part == Part::kRun || field.name == "steps") continue;
    std::visit(
        [&](const auto member) {
          MOXIE_CHECK(config.*member == saved.*member, "--resume: ", field.flag(),
                      " is not what the run in '", folder, "' began with; start another run");
        },
        field.member);
  }
  config.out = folder;
  return config;
}

// The file for the weights at the end of a resumed run; empty if none. The run's folder may come
// from another user, so without a flag its config must not make this program write a file outside
// of it.
std::string resumed_weights_path(const ConfigFlags& flags, const Config& config, bool is_finished) {
  if (flags.has("save_weights") || config.save_weights.empty()) return config.save_weights;
  if (is_finished) return "";  // a finished run has written them
  if (is_inside({config.out}, config.save_weights)) return config.save_weights;
  std::fprintf(
      stderr, "%s\n",
      plain("moxie: '" + RunFolder{config.out}.config() + "' names '" + config.save_weights +
            "' for the weights, which is outside of the run's folder; it is not written "
            "unless --save-weights names it again")
          .c_str());
  return "";
}

Result begin(Config config) {
  check(config);
  const RunFolder folder{config.out};
  std::filesystem::create_directories(folder.path);
  const FolderLock lock(folder.lock());
  MOXIE_CHECK(!holds_run(folder), "'", folder.path,
              "' holds a run already; --resume continues it, --out takes another folder");
  TrainArgs args{.config = std::move(config), .lock = lock};
  args.save_weights = args.config.save_weights;
  return train(args);
}

Result resume(const ConfigFlags& flags, const std::string& out) {
  const RunFolder folder{out};
  MOXIE_CHECK(holds_run(folder), "--resume: '", out, "' holds no run: there is no config.json");
  const FolderLock lock(folder.lock());  // before reading, so that nobody else writes
  RunState before = read_run(folder);
  Config config = resumed_config(flags, before.config, out);
  const std::optional<Result> finished = finished_result(folder, config.steps, before);
  const std::string weights = resumed_weights_path(flags, config, finished.has_value());
  return train({.config = std::move(config),
                .lock = lock,
                .before = std::move(before),
                .finished = finished,
                .save_weights = weights});
}

void print(const Result& result, const std::string& folder) {
  std::printf("%s\n", plain(folder).c_str());
  Table table({"held-out loss", "bigram entropy", "tokens/s", "time", "peak memory"});
  table.add({fixed(result.eval_loss, 4), fixed(result.bigram_entropy, 4),
             human_count(result.tokens_per_s), human_time(result.seconds),
             human_bytes(static_cast<double>(result.peak_memory_bytes))});
  std::printf("%s", table.text().c_str());
}

void run(const Flags& flags) {
  const InterruptSignals signals;
  Config config = flags.config.config();
  if (config.out.empty()) config.out = default_run_folder(config);
  const std::string out = config.out;
  const Result result = flags.resume ? resume(flags.config, out) : begin(std::move(config));
  if (flags.json)
    std::printf("%s\n", to_json(result).dump(-1, ' ', /*ensure_ascii=*/true).c_str());
  else
    print(result, out);
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
