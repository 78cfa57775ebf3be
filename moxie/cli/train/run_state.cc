#include "moxie/cli/train/run_state.h"

#include <cmath>
#include <filesystem>

#include "moxie/cli/file/json.h"
#include "moxie/cli/file/mapped_file.h"
#include "moxie/core/base/check.h"

namespace moxie::cli {
namespace {

namespace fs = std::filesystem;

bool is_same(const Config& a, const Config& b, const Field& field) {
  return std::visit([&](const auto member) { return a.*member == b.*member; }, field.member);
}

// Whether a field says only where the run is, what it is called or where its weights are written;
// results do not depend on it.
bool is_about_files(const Field& field) {
  return field.name == "out" || field.name == "title" || field.name == "save_weights";
}

// Compares config.json with the config in the newest checkpoint. A resumed run may have changed
// some fields in config.json, so these may differ, which is noted; others must not.
void compare_configs(const RunFolder& folder, RunState& state) {
  const Config &config = state.config, &saved = state.newest->saved.config;
  const auto differs = [&](std::string_view name, const std::string& here,
                           const std::string& there) {
    return "\"" + std::string(name) + "\" is " + here + " in '" + folder.config() + "' and " +
           there + " in '" + state.newest->path + "'";
  };
  for (const Field& field : fields()) {
    if (is_same(config, saved, field) || is_about_files(field)) continue;
    const std::string text =
        differs(field.name, value_text(config, field), value_text(saved, field));
    MOXIE_CHECK(field.part == Part::kRun || field.name == "steps", text,
                ": one of the two was edited or damaged; a run goes on only with the config it "
                "began with");
    state.notes.push_back(text + "; the run goes on with the first");
  }
  if (config.preset != saved.preset)
    state.notes.push_back(differs("preset", config.preset, saved.preset) +
                          "; the fields count, not its name");
}

// Chooses the newest checkpoint by the step inside the file. One that cannot be read is an error,
// because it might be the newest, unless its name has an older step.
void choose_newest(const RunFolder& folder, RunState& state) {
  for (Checkpoint& checkpoint : find_checkpoints(folder.checkpoints())) {
    const int64_t named = named_step(checkpoint.path), step = checkpoint.saved.position.step;
    if (checkpoint.problem.empty()) {
      if (named != step)
        state.notes.push_back("'" + checkpoint.path + "' holds step " + std::to_string(step) +
                              ", whatever its name says");
      if (!state.newest) state.newest = std::move(checkpoint);
      continue;
    }
    const int64_t newest = state.newest ? state.newest->saved.position.step : -1;
    MOXIE_CHECK(named >= 0 && named < newest, checkpoint.problem,
                "; without it the run goes on from the checkpoint before");
    state.notes.push_back(checkpoint.problem + "; it is not needed");
  }
}

void check_newest(const RunFolder& folder, RunState& state) {
  const Checkpoint& newest = *state.newest;
  const Position& at = newest.saved.position;
  const Config& config = newest.saved.config;
  const int64_t step = at.step;
  int64_t windows = 0;
  MOXIE_CHECK(!__builtin_mul_overflow(step, config.batch * config.accumulate, &windows) &&
                  windows == at.window,
              "'", newest.path, "': ", step, " steps of ", config.batch * config.accumulate,
              " windows are not the ", at.window, " that it says");
  compare_configs(folder, state);
  const Ledger& ledger = state.ledger;
  MOXIE_CHECK(ledger.checkpoint.empty() || ledger.checkpoint == newest.checksum, "'", newest.path,
              "' is not the checkpoint that '", folder.metrics(), "' notes for step ", step,
              ": its checksum is ", printable(newest.checksum), ", not ",
              printable(ledger.checkpoint),
              "; one of the two was edited or damaged: remove that one, and the run goes on");
  if (ledger.checkpoint.empty())
    state.notes.push_back("'" + newest.path + "' is unchecked but for its own checksum, as '" +
                          folder.metrics() + "' does not note it");
  if (newest.saved.metrics.empty())
    state.notes.push_back("'" + folder.metrics() + "' is unchecked, as '" + newest.path +
                          "' does not note its checksum");
  else if (newest.saved.metrics != ledger.before)
    state.notes.push_back("'" + folder.metrics() + "' is not what the run wrote up to step " +
                          std::to_string(step) + ": it was edited or damaged");
}

void check_result(const RunFolder& folder, const Result& result, RunState& state) {
  const Ledger& ledger = state.ledger;
  const std::string again = "; without it --resume evaluates again";
  if (ledger.result.empty() || ledger.result_step != result.steps) {
    state.notes.push_back("'" + folder.result() + "' is unchecked, as '" + folder.metrics() +
                          "' does not note it" + again);
  } else {
    const MappedFile file(folder.result());
    MOXIE_CHECK(checksum_of(file.bytes()) == ledger.result, "'", folder.result(),
                "' is not what the run wrote: '", folder.metrics(), "' notes another checksum",
                again);
  }
  if (!ledger.last) {
    state.notes.push_back("'" + folder.metrics() + "' lacks the last evaluation");
    return;
  }
  // In JSON, a loss that is not finite is written as null.
  const nlohmann::json loss =
      std::isfinite(result.eval_loss) ? nlohmann::json(result.eval_loss) : nlohmann::json();
  const bool says_windows = result.eval_windows > 0;  // old result files do not have it
  MOXIE_CHECK(ledger.last->step == result.steps && ledger.last->loss == loss &&
                  (!says_windows || ledger.last->windows == nlohmann::json(result.eval_windows)),
              "'", folder.result(), "' and the last evaluation in '", folder.metrics(),
              "' are not the same: one of the two was edited or damaged", again);
}

}  // namespace

std::string value_text(const Config& config, const Field& field) {
  return std::visit(
      [&](const auto member) {
        return printable(nlohmann::json(config.*member)
                             .dump(-1, ' ', true, nlohmann::json::error_handler_t::replace));
      },
      field.member);
}

RunState read_run(const RunFolder& folder) {
  MOXIE_CHECK(holds_run(folder), "--resume: '", folder.path,
              "' holds no run: there is no config.json");
  RunState state;
  choose_newest(folder, state);
  MOXIE_CHECK(fs::exists(folder.config()), "--resume: '", folder.path,
              "' holds a run without its config.json; put that back",
              state.newest ? ", or take the weights of '" + state.newest->path +
                                 "' into another run with --init"
                           : std::string());
  state.config = read_saved_config(folder.config());
  state.ledger =
      read_ledger(folder.metrics(), state.newest ? state.newest->saved.position.step : 0);
  if (state.newest)
    check_newest(folder, state);
  else if (state.ledger.exists)
    state.notes.push_back("'" + folder.path +
                          "' has no checkpoint yet: the run begins again, with a config.json that "
                          "nothing confirms");
  if (state.ledger.strange > 0)
    state.notes.push_back("'" + folder.metrics() + "' has " + std::to_string(state.ledger.strange) +
                          " lines that no run writes");
  return state;
}

std::optional<Result> finished_result(const RunFolder& folder, int64_t steps, RunState& state) {
  MOXIE_CHECK(!state.newest || state.newest->saved.position.step <= steps, "--steps: the run in '",
              folder.path, "' has taken ", state.newest->saved.position.step,
              " steps already, got ", steps);
  const std::optional<Result> result = finished_result(folder.result(), steps);
  if (!result) return result;
  check_result(folder, *result, state);
  if (!state.newest || state.newest->saved.position.step != steps) {
    state.notes.push_back("'" + folder.path + "' has no checkpoint of step " +
                          std::to_string(steps) + " to compare its result with");
    return result;
  }
  const std::string& fingerprint = state.newest->saved.position.data_fingerprint;
  MOXIE_CHECK(result->data_fingerprint.empty() || result->data_fingerprint == fingerprint, "'",
              folder.result(), "' is of other text than '", state.newest->path,
              "': one of the two was edited or damaged; without the first --resume evaluates "
              "again");
  if (state.ledger.later > 0)
    state.notes.push_back("'" + folder.metrics() + "' has " + std::to_string(state.ledger.later) +
                          " lines of steps that the run did not take");
  return result;
}

}  // namespace moxie::cli
