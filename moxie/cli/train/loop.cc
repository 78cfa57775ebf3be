#include "moxie/cli/train/loop.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <optional>

#include "moxie/cli/file/atomic_file.h"
#include "moxie/cli/terminal.h"
#include "moxie/cli/text.h"
#include "moxie/cli/train/batches.h"
#include "moxie/cli/train/checkpoint.h"
#include "moxie/cli/train/data.h"
#include "moxie/cli/train/machine.h"
#include "moxie/cli/train/metrics.h"
#include "moxie/cli/train/model.h"
#include "moxie/cli/train/optimizer.h"
#include "moxie/cli/train/stats.h"
#include "moxie/cli/train/watch.h"
#include "moxie/core/base/check.h"

namespace moxie::cli {
namespace {

// With more parameters than this, messages say what takes long: making or reading such a model
// takes seconds, and writing it ten times as long.
constexpr int64_t kLargeModel = 50'000'000;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class Run {
 public:
  explicit Run(const TrainArgs& args);
  Result train();
  void write_weights();  // writes the weights of the last step to args.save_weights

 private:
  void resume_or_init(const std::optional<Checkpoint>& newest);
  int64_t tokens() const { return position_.step * config_.tokens_per_step(); }
  int64_t held_out(int64_t asked) const { return std::min(asked, corpus_.held_out_windows()); }
  double evaluate(int64_t count, Progress* progress);
  nlohmann::ordered_json evaluation(double loss, int64_t count) const;  // as a line of metrics
  double final_evaluation();
  void step(Stats* stats);
  void not_finite(const at::Tensor& windows);
  void save();
  void stop_if_interrupted();
  bool is_due(int64_t every) const { return every > 0 && position_.step % every == 0; }

  Config config_;
  const FolderLock& lock_;
  std::string weights_path_;
  RunFolder folder_;
  c10::Device device_;
  Corpus corpus_;
  Batches batches_;
  LanguageModel model_;
  AdamW optimizer_;
  Position position_;
  std::optional<Metrics> metrics_;
  std::optional<Progress> progress_;
  double loss_ = 0, tokens_per_s_ = 0;
  int64_t saved_step_ = -1;
};

std::string title_of(const Config& config) { return config.title.empty() ? "train" : config.title; }

void say(const Config& config, const std::string& text) {
  std::fprintf(stderr, "%s\n", plain(title_of(config) + ": " + text).c_str());
}

[[noreturn]] void stop(const std::string& when, const RunFolder& folder) {
  throw Interrupted("interrupted " + when + "; " +
                    (holds_run(folder) ? "'moxie train --resume --out " + folder.path + "' goes on"
                                       : "nothing was written"));
}

LanguageModel make_model(const Config& config, c10::Device device) {
  const int64_t parameters = check_model(config);
  if (parameters > kLargeModel)
    say(config, "making " + human_count(static_cast<double>(parameters)) + " parameters on " +
                    describe(device));
  LanguageModel model(config, device);
  quantize(*model, recipes_of(config));
  return model;
}

Run::Run(const TrainArgs& args)
    : config_(args.config),
      lock_(args.lock),
      weights_path_(args.save_weights),
      folder_{config_.out},
      device_(choose_device(config_.device)),
      corpus_({.paths = config_.data,
               .seq_len = config_.seq_len,
               .held_out = config_.held_out,
               .seed = static_cast<uint64_t>(config_.seed)}),
      batches_(config_, corpus_, device_),
      model_(make_model(config_, device_)),
      optimizer_(*model_, config_) {
  const Config& config = config_;
  position_.data_fingerprint = corpus_.fingerprint();
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  generator.set_current_seed(static_cast<uint64_t>(config.seed));
  resume_or_init(args.before.newest);
  progress_.emplace(title_of(config_), position_.step, config.steps);
  progress_->note(
      title_of(config_) + ": " + human_count(static_cast<double>(model_->parameter_count())) +
      " parameters on " + describe(device_) + ", recipe " + join(config.recipe, " ") + ", " +
      human_bytes(static_cast<double>(corpus_.bytes())) + " of text in " +
      std::to_string(corpus_.files()) + " files" +
      (position_.step > 0 ? ", resumed at step " + std::to_string(position_.step) : ""));
}

void Run::resume_or_init(const std::optional<Checkpoint>& checkpoint) {
  if (!checkpoint) {
    if (!config_.init.empty()) load_weights(config_.init, {*model_, optimizer_});
    return;
  }
  const std::string& newest = checkpoint->path;
  if (model_->parameter_count() > kLargeModel) say(config_, "reading '" + newest + "'");
  position_ = load_checkpoint(newest, {*model_, optimizer_});
  MOXIE_CHECK(!is_old_fingerprint(position_.data_fingerprint), "'", newest,
              "' is of a moxie that did not note how it split the data: going on, it could train "
              "on what it held out; start another run");
  MOXIE_CHECK(position_.data_fingerprint == corpus_.fingerprint(),
              "the data is not what it was: its fingerprint is ", corpus_.fingerprint(), ", in '",
              newest, "' it is ", position_.data_fingerprint);
  saved_step_ = position_.step;
}

double Run::evaluate(int64_t count, Progress* progress) {
  const at::NoGradGuard no_grad;
  model_->eval();
  double sum = 0;
  for (int64_t first = 0; first < count; first += config_.batch) {
    if (progress != nullptr) {
      progress->show(first, "");
      stop_if_interrupted();
    }
    const at::Tensor batch = batches_.held_out(first, count);
    sum += model_->forward(batch).tokens.item<double>() * static_cast<double>(batch.size(0));
  }
  model_->train();
  return sum / static_cast<double>(count);
}

nlohmann::ordered_json Run::evaluation(double loss, int64_t count) const {
  return {{"event", "eval"}, {"step", position_.step}, {"loss", loss}, {"windows", count}};
}

double Run::final_evaluation() {
  const int64_t count = held_out(config_.final_eval_windows);
  // Saves before the final evaluation, which takes as long as many steps. One batch is evaluated
  // first, so that no model is saved that the last step broke.
  if (std::isfinite(evaluate(std::min(config_.batch, count), nullptr))) save();
  Progress progress(title_of(config_), 0, count, "held-out window");
  const double loss = evaluate(count, &progress);
  nlohmann::ordered_json line = evaluation(loss, count);
  line["final"] = true;
  const bool broken = !std::isfinite(loss) && config_.on_nan == "stop";
  if (!broken) save();  // saved first: a resumed run writes the metrics line again
  metrics_->write(line);
  // A step that breaks the model is noticed by the next one; the last step has no next.
  if (broken)
    throw NotFinite("step " + std::to_string(position_.step) +
                    ": the held-out loss is not finite: " +
                    find_not_finite(*model_, optimizer_, batches_.held_out(0, count)));
  return loss;
}

// Takes an optimizer step. stats: null unless statistics of this step are due.
void Run::step(Stats* stats) {
  const double start = now();
  at::Tensor batch, loss;
  for (int64_t micro = 0; micro < config_.accumulate; ++micro) {
    batch = batches_.to_train(position_.window);
    const Losses losses = model_->forward(batch);
    const auto share = 1 / static_cast<double>(config_.accumulate);
    ((losses.tokens + losses.routers) * share).backward();
    loss = loss.defined() ? loss + losses.tokens.detach() * share : losses.tokens.detach() * share;
    optimizer_.accumulate();
    position_.window += config_.batch;
  }
  // The loss and the norm of the gradient decide whether the step is taken; they are copied to the
  // host together, once per step.
  const at::Tensor seen = at::stack({loss, optimizer_.grad_norm()}).cpu().to(at::kDouble);
  loss_ = seen[0].item<double>();
  const double norm = seen[1].item<double>();
  if (std::isfinite(loss_) && std::isfinite(norm)) {
    optimizer_.step(position_.step, norm);
    if (stats != nullptr) stats->count_load();
    model_->update_routers();
  } else {
    not_finite(batch);
  }
  const double seconds = now() - start;
  position_.seconds += seconds;
  tokens_per_s_ = static_cast<double>(config_.tokens_per_step()) / seconds;
  metrics_->write({{"event", "step"},
                   {"step", ++position_.step},
                   {"loss", loss_},
                   {"lr", learning_rate(config_, position_.step - 1)},
                   {"grad_norm", norm},
                   {"tokens_per_s", tokens_per_s_}});
}

void Run::not_finite(const at::Tensor& windows) {
  const std::string where = find_not_finite(*model_, optimizer_, windows);
  const std::string text = "step " + std::to_string(position_.step + 1) +
                           ": the loss or its gradient is not finite: " + where;
  metrics_->write({{"event", "not_finite"}, {"step", position_.step + 1}, {"where", where}});
  if (config_.on_nan == "stop") throw NotFinite(text);
  progress_->note(text + "; the step is skipped");
  optimizer_.drop_gradients();
}

void Run::save() {
  if (saved_step_ == position_.step) return;
  lock_.check_folder();
  if (model_->parameter_count() > 10 * kLargeModel)
    progress_->note(title_of(config_) + ": writing a checkpoint");
  save_checkpoint(folder_.checkpoints(),
                  {.config = config_, .position = position_, .metrics = metrics_->checksum()},
                  {*model_, optimizer_}, [&](const std::string& checksum) {
                    metrics_->note_checkpoint(position_.step, checksum);
                  });
  saved_step_ = position_.step;
}

void Run::write_weights() {
  MOXIE_CHECK(position_.step == config_.steps, "--save-weights: '", folder_.checkpoints(),
              "' has no checkpoint of step ", config_.steps);
  save_weights(weights_path_, {*model_, optimizer_});
}

void Run::stop_if_interrupted() {
  if (!interrupted()) return;
  if (position_.step == 0) stop("before the first step", folder_);
  save();
  stop("at step " + std::to_string(position_.step), folder_);
}

Result Run::train() {
  metrics_.emplace(folder_.metrics(), position_.step);
  stop_if_interrupted();
  model_->train();
  while (position_.step < config_.steps) {
    const bool has_trained = tokens_per_s_ > 0;  // false at the start and right after a resume
    const std::string speed = human_count(tokens_per_s_) + " tokens/s";
    progress_->show(position_.step, has_trained ? "loss " + fixed(loss_, 3) + "  " + speed : "");
    std::optional<Stats> stats;
    if (is_due(config_.stats_every)) stats.emplace(*model_);
    step(stats ? &*stats : nullptr);
    if (stats) stats->write(position_.step, *metrics_);
    const int64_t count = held_out(config_.eval_windows);
    if (is_due(config_.eval_every)) metrics_->write(evaluation(evaluate(count, nullptr), count));
    if (is_due(config_.save_every)) save();
    stop_if_interrupted();
  }
  const double eval_loss = final_evaluation();
  if (!weights_path_.empty()) write_weights();
  progress_->show(position_.step, "held-out loss " + fixed(eval_loss, 4));
  const Result result{.steps = position_.step,
                      .parameters = model_->parameter_count(),
                      .eval_loss = eval_loss,
                      .eval_windows = held_out(config_.final_eval_windows),
                      .bigram_entropy = corpus_.bigram_entropy(),
                      .data_fingerprint = corpus_.fingerprint(),
                      .tokens_per_s = static_cast<double>(tokens()) / position_.seconds,
                      .seconds = position_.seconds,
                      .peak_memory_bytes = peak_memory_bytes(device_),
                      .device = describe(device_)};
  const std::string text = to_json(result).dump(2) + "\n";
  lock_.check_folder();
  metrics_->note_result(result.steps, text);
  write_file(folder_.result(), text);  // replaces the result of an earlier run of fewer steps
  return result;
}

}  // namespace

Result train(TrainArgs args) {
  Config& config = args.config;
  check(config);
  const RunFolder folder{config.out};
  if (config.threads > 0) at::set_num_threads(static_cast<int>(config.threads));
  config.threads = at::get_num_threads();  // kept for resumed runs, as sums depend on it
  remove_unfinished_files(folder);
  if (!args.save_weights.empty()) check_weights_path(args.save_weights, folder);
  const std::optional<Result>& finished = args.finished;
  for (const std::string& note : args.before.notes) say(config, note);
  if (finished)
    say(config, "the run in '" + folder.path + "' is finished; with more --steps it goes on");
  if (finished && args.save_weights.empty()) return *finished;
  Run run(args);
  if (finished) {
    run.write_weights();
    return *finished;
  }
  if (interrupted())
    stop(args.before.newest ? "before the next step" : "before the first step", folder);
  make_checkpoint_folder(folder);
  write_file(folder.config(), to_json(config).dump(2) + "\n");
  return run.train();
}

}  // namespace moxie::cli
