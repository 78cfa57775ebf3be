#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>

#include "moxie/cli/command.h"
#include "moxie/cli/compare/comparison.h"
#include "moxie/cli/compare/report.h"
#include "moxie/cli/file/atomic_file.h"
#include "moxie/cli/file/error.h"
#include "moxie/cli/file/lock.h"
#include "moxie/cli/text.h"
#include "moxie/cli/train/flags.h"
#include "moxie/cli/train/loop.h"
#include "moxie/cli/train/model.h"
#include "moxie/core/base/check.h"

namespace moxie::cli {
namespace {

constexpr const char* kWhat = "Train the same model with several recipes and compare them";
constexpr const char* kMore =
    "Examples:\n"
    "  moxie compare                                   bf16 and MXFP8, two seeds, the tiny preset\n"
    "  moxie compare --recipes bf16 mxfp8_rceil_128 experts=mxfp8_rceil+linears=bf16\n"
    "  moxie compare --seeds 5 --require 1             fails if MXFP8 may lose more than 1 %\n"
    "  moxie compare --resume --out runs/x             go on after a kill, a crash or Ctrl-C\n"
    "  moxie compare --resume --out runs/x --seeds 5   more seeds for what is there\n"
    "\n"
    "Runs take the seeds 1 to N, each recipe from the same weights and data. The folder holds a "
    "run\n"
    "of moxie train for each, compare.json, report.html and pictures/. docs/COMPARE.md says more.";

struct Flags {
  ConfigFlags config;
  Words recipes;
  std::optional<int64_t> seeds;
  std::string out;
  bool resume = false, json = false, require_learned = false;
  std::optional<double> require;
};

// Whether a resumed comparison may change this field, because it does not affect results.
bool may_change(std::string_view name) {
  return name == "device" || name == "threads" || name == "save_every" || name == "keep";
}

void check_holds_comparison(const CompareFolder& folder) {
  MOXIE_CHECK(std::filesystem::exists(folder.plan()), "--resume: '", folder.path,
              "' holds no comparison: there is no plan.json");
}

Plan resumed_plan(const Flags& flags, const CompareFolder& folder) {
  check_holds_comparison(folder);
  Plan plan = read_plan(folder.plan());
  const Config saved = plan.config;
  plan.config = flags.config.resumed(saved);
  for (const Field& field : fields()) {
    if (may_change(field.name) || is_own_field(field.name)) continue;
    std::visit(
        [&](const auto member) {
          MOXIE_CHECK(plan.config.*member == saved.*member, "--resume: ", field.flag(),
                      " is not what the comparison in '", folder.path,
                      "' began with; start another one");
        },
        field.member);
  }
  return plan;
}

Plan plan_of(const Flags& flags, const CompareFolder& folder) {
  Plan plan{.config = {}, .recipes = {"bf16", "mxfp8_rceil_128"}, .seeds = 2};
  if (flags.resume) {
    plan = resumed_plan(flags, folder);
  } else {
    MOXIE_CHECK(!std::filesystem::exists(folder.plan()), "'", folder.path,
                "' holds a comparison already; --resume continues it, --out takes another folder");
    plan.config = flags.config.config();
  }
  for (const Field& field : fields())  // a --config may hold fields that each run sets itself
    if (is_own_field(field.name))
      std::visit([&](const auto member) { plan.config.*member = Config().*member; }, field.member);
  if (!flags.recipes.empty()) plan.recipes = flags.recipes;
  plan.seeds = flags.seeds.value_or(plan.seeds);
  MOXIE_CHECK(!flags.require || plan.seeds > 1,
              "--require needs the interval of at least 2 --seeds, got ", plan.seeds);
  return plan;
}

// Checks the models of all recipes at the start: the first run of a recipe may begin only hours
// later.
void check_recipes(const std::vector<PlannedRun>& runs) {
  for (const PlannedRun& run : runs)
    if (run.seed == 1) check_model(run.config);
}

[[noreturn]] void stop(const std::string& what, const CompareFolder& folder) {
  throw Interrupted(what + "; 'moxie compare --resume --out " + folder.path + "' goes on");
}

void say(const std::string& line) { std::fprintf(stderr, "%s\n", plain(line).c_str()); }

// Checks that the run in a folder is the planned one: compares every field that affects its results
// or its evaluation.
void check_planned(const PlannedRun& run, const Config& config, const CompareFolder& folder) {
  for (const Field& field : fields()) {
    const bool is_elsewhere =
        field.name == "out" || field.name == "title" || field.name == "save_weights";
    if (is_elsewhere || may_change(field.name)) continue;
    std::visit(
        [&](const auto member) {
          MOXIE_CHECK(config.*member == run.config.*member, "the run in '", folder.of(run),
                      "' has ", field.flag(), " ", value_text(config, field), ", '", folder.plan(),
                      "' has ", value_text(run.config, field),
                      ": they are not compared. Where the plan was edited, start another "
                      "comparison; without the run's folder it is trained again");
        },
        field.member);
  }
}

// The result of a run, or nothing if it still has to be trained. Compares the run's folder with the
// plan, under its lock; if the folder holds no run yet, writes its config.
std::optional<Result> result_of(const PlannedRun& run, const CompareFolder& folder) {
  const RunFolder of_run{folder.of(run)};
  if (std::filesystem::is_symlink(of_run.path))
    throw IoError("cannot write '" + of_run.path +
                  "': it is a link, and a comparison writes inside its own folder alone");
  std::filesystem::create_directories(of_run.path);
  const FolderLock lock(of_run.lock());
  if (!holds_run(of_run)) {
    write_file(of_run.config(), to_json(run.config).dump(2) + "\n");
    return std::nullopt;
  }
  RunState state = read_run(of_run);
  check_planned(run, state.config, folder);
  std::optional<Result> result = finished_result(of_run, state.config.steps, state);
  if (result)  // an unfinished run prints its notes itself when it resumes
    for (const std::string& note : state.notes) say(run.name + ": " + note);
  return result;
}

// Trains a run in a child process. result_of() has written its config, so that a new run is started
// with --resume like any other.
Result train_in_child(const PlannedRun& run, const std::string& title, const Flags& flags,
                      const CompareFolder& folder, Children& children) {
  const RunFolder of_run{folder.of(run)};
  Words args = {"train", "--resume", "--out", of_run.path, "--title", title};
  for (const Field& field : fields())
    if (may_change(field.name) && flags.config.has(field.name))
      args.insert(args.end(), {field.flag(), flags.config.given.at(field.name).front()});
  const int code = children.run("/proc/self/exe", args);
  if (children.interrupted()) stop("interrupted in " + run.name, folder);
  if (code != kDone)
    throw std::runtime_error(
        run.name + " failed with exit code " + std::to_string(code) +
        "; what is finished is kept. Once its cause is mended, 'moxie compare --resume --out " +
        folder.path + "' goes on; with --recipes it can leave " + run.recipe + " out");
  const std::optional<Result> result = result_of(run, folder);
  if (!result) throw std::runtime_error(run.name + " ended without a result");
  return *result;
}

std::vector<ComparedRun> train_all(const std::vector<PlannedRun>& runs, const Flags& flags,
                                   const CompareFolder& folder, Children& children) {
  std::vector<ComparedRun> compared;
  size_t kept = 0;
  for (const PlannedRun& run : runs) {
    if (children.interrupted()) stop("interrupted before " + run.name, folder);
    const std::string title = run.name + " (" + std::to_string(compared.size() + 1) + "/" +
                              std::to_string(runs.size()) + ")";
    const std::optional<Result> finished = result_of(run, folder);
    if (!finished) {
      compared.push_back({run, train_in_child(run, title, flags, folder, children)});
      continue;
    }
    compared.push_back({run, *finished});
    say(title + ": finished before, held-out loss " + fixed(finished->eval_loss, 4));
    ++kept;
  }
  if (kept == runs.size())
    say("Nothing was left to train; without '" + folder.path + "' it begins anew.");
  return compared;
}

void require(const Flags& flags, const Comparison& comparison) {
  Words broken;
  if (flags.require) broken = recipes_above(comparison, *flags.require);
  if (flags.require_learned)
    for (std::string& line : recipes_not_learned(comparison)) broken.push_back(std::move(line));
  if (!broken.empty()) throw std::runtime_error("not as required: " + join(broken, "; "));
}

void run(const Flags& flags) {
  CompareFolder folder{flags.out};
  if (folder.path.empty()) {
    MOXIE_CHECK(!flags.resume, "--resume needs --out, the folder of the comparison");
    folder.path = "runs/compare-" + flags.config.config().preset;
  }
  Children children;  // from here on, signals are only recorded
  if (flags.resume)
    check_holds_comparison(folder);
  else
    check_recipes(runs_of(plan_of(flags, folder)));  // checked before any file is written
  std::filesystem::create_directories(folder.path);
  const FolderLock lock(folder.lock());
  remove_unfinished_files(folder.path, [](std::string_view name) {
    return name == "plan.json" || name == "compare.json" || name == "report.html";
  });
  const Plan plan = plan_of(flags, folder);
  const std::vector<PlannedRun> runs = runs_of(plan);
  check_recipes(runs);
  write_file(folder.plan(), to_json(plan).dump(2) + "\n");
  const Comparison comparison = compare(plan, train_all(runs, flags, folder, children));
  const std::string json = to_json(comparison).dump(2, ' ', /*ensure_ascii=*/true) + "\n";
  write_file(folder.result(), json);
  std::printf("%s", flags.json ? json.c_str() : text_of(comparison).c_str());
  std::fflush(stdout);  // shows the result before the pictures, which take seconds
  if (write_report(folder, children))
    std::fprintf(flags.json ? stderr : stdout, "Report: %s\n", plain(folder.report()).c_str());
  require(flags, comparison);
}

// Adds the flags of `compare`: its own, and those of train's fields that a run does not set itself.
void add_flags(CLI::App& command, Flags& flags) {
  command
      .add_option("--recipes", flags.recipes,
                  "what to compare; the first is the base of the differences. Each is what "
                  "--recipe of train takes, its words joined by '+' [bf16 mxfp8_rceil_128]")
      ->type_name("RECIPE");
  command.add_option("--seeds", flags.seeds, "runs of each recipe, from seeds 1 to N [2]")
      ->type_name("N");
  command.add_flag("--resume", flags.resume,
                   "keep the finished runs in --out, go on with the others");
  command.add_flag("--json", flags.json, "print compare.json, not a table");
  command
      .add_option("--require", flags.require,
                  "exit code 1 unless the upper end of each recipe's interval is at most this")
      ->type_name("PERCENT");
  command.add_flag("--require-learned", flags.require_learned,
                   "exit code 1 unless each recipe's loss is below the text's bigram entropy");
  add_config_flags(command, flags.config);
  for (const Field& field : fields())
    if (is_own_field(field.name)) command.remove_option(command.get_option(field.flag()));
  command.add_option("--out", flags.out, "folder of the comparison [runs/compare-PRESET]")
      ->type_name("FOLDER");
}

}  // namespace

void add_compare(CLI::App& app) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("compare", kWhat);
  command->footer(kMore);
  add_flags(*command, *flags);
  command->callback([flags] { run(*flags); });
}

}  // namespace moxie::cli
