#include "moxie/cli/train/loop.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <optional>

#include "moxie/cli/file/atomic_file.h"
#include "moxie/cli/terminal.h"
#include "moxie/cli/text.h"
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

using Json = nlohmann::ordered_json;

double now() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(time).count();
}

class Run {
 public:
  Run(const Config& config, Start start);
  Result train();

 private:
  enum class Text : uint8_t { kTrain, kHeldOut };
  at::Tensor windows(Text text, int64_t first) const;  // int64 [B, S + 1]
  double evaluate();
  void step(Stats* stats);
  void not_finite(const at::Tensor& windows);
  void save();
  bool is_due(int64_t every) const { return every > 0 && position_.step % every == 0; }

  Config config_;
  RunFolder folder_;
  c10::Device device_;
  Corpus corpus_;
  LanguageModel model_;
  AdamW optimizer_;
  Position position_;
  std::optional<Metrics> metrics_;
  std::optional<Progress> progress_;
  double loss_ = 0, eval_loss_ = 0, tokens_per_s_ = 0;
  int64_t saved_step_ = -1;
};

LanguageModel make_model(const Config& config, c10::Device device) {
  LanguageModel model(config);
  quantize(*model, recipes_of(config));
  model->to(device);
  return model;
}

Run::Run(const Config& config, Start start)
    : config_(config),
      folder_{config.out},
      device_(choose_device(config.device)),
      corpus_({.paths = config.data,
               .seq_len = config.seq_len,
               .held_out = config.held_out,
               .seed = static_cast<uint64_t>(config.seed)}),
      model_(make_model(config, device_)),
      optimizer_(*model_, config) {
  position_.data_fingerprint = corpus_.fingerprint();
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  generator.set_current_seed(static_cast<uint64_t>(config.seed));
  remove_unfinished_files(folder_.checkpoints());
  const std::vector<std::string> checkpoints = find_checkpoints(folder_.checkpoints());
  if (start == Start::kResume && !checkpoints.empty()) {
    position_ = load_checkpoint(checkpoints.front(), {*model_, optimizer_});
    MOXIE_CHECK(position_.data_fingerprint == corpus_.fingerprint(),
                "the data is not what it was: its fingerprint is ", corpus_.fingerprint(), ", in '",
                checkpoints.front(), "' it is ", position_.data_fingerprint);
    MOXIE_CHECK(position_.step <= config.steps, "--steps: the run in '", folder_.path,
                "' has taken ", position_.step, " steps already, got ", config.steps);
    saved_step_ = position_.step;
  } else if (!config.init.empty()) {
    load_weights(config.init, {*model_, optimizer_});
  }
  std::filesystem::create_directories(folder_.checkpoints());
  metrics_.emplace(folder_.metrics(), position_.step);
  const std::string title = config.title.empty() ? "train" : config.title;
  progress_.emplace(title, position_.step, config.steps);
  progress_->note(
      title + ": " + human_count(static_cast<double>(model_->parameter_count())) +
      " parameters on " + describe(device_) + ", recipe " + join(config.recipe, " ") + ", " +
      human_bytes(static_cast<double>(corpus_.bytes())) + " of text in " +
      std::to_string(corpus_.files()) + " files" +
      (position_.step > 0 ? ", resumed at step " + std::to_string(position_.step) : ""));
}

at::Tensor Run::windows(Text text, int64_t first) const {
  const int64_t length = config_.seq_len + 1;
  at::Tensor bytes = at::empty({config_.batch, length}, at::kByte);
  for (int64_t i = 0; i < config_.batch; ++i) {
    uint8_t* to = bytes.mutable_data_ptr<uint8_t>() + i * length;
    if (text == Text::kTrain)
      corpus_.read(first + i, to);
    else
      corpus_.read_held_out(first + i, config_.eval_windows, to);
  }
  return bytes.to(device_).to(at::kLong);
}

double Run::evaluate() {
  const at::NoGradGuard no_grad;
  model_->eval();
  double sum = 0;
  int64_t batches = 0;
  for (int64_t first = 0; first + config_.batch <= config_.eval_windows; first += config_.batch) {
    sum += model_->forward(windows(Text::kHeldOut, first)).tokens.item<double>();
    ++batches;
  }
  model_->train();
  return sum / static_cast<double>(batches);
}

// stats: of a step whose statistics are due.
void Run::step(Stats* stats) {
  const double start = now();
  at::Tensor batch, loss;
  for (int64_t micro = 0; micro < config_.accumulate; ++micro) {
    batch = windows(Text::kTrain, position_.window);
    const Losses losses = model_->forward(batch);
    const auto share = 1 / static_cast<double>(config_.accumulate);
    ((losses.tokens + losses.routers) * share).backward();
    loss = loss.defined() ? loss + losses.tokens.detach() * share : losses.tokens.detach() * share;
    optimizer_.accumulate();
    position_.window += config_.batch;
  }
  // One copy to the host for a step: what decides whether the step is taken.
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
  save_checkpoint(folder_.checkpoints(), config_, position_, {*model_, optimizer_});
  saved_step_ = position_.step;
}

Result Run::train() {
  const InterruptSignals signals;
  model_->train();
  while (position_.step < config_.steps) {
    const bool has_trained = tokens_per_s_ > 0;  // not at the start, nor right after a resume
    const std::string speed = human_count(tokens_per_s_) + " tokens/s";
    progress_->show(position_.step, has_trained ? "loss " + fixed(loss_, 3) + "  " + speed : "");
    std::optional<Stats> stats;
    if (is_due(config_.stats_every)) stats.emplace(*model_);
    step(stats ? &*stats : nullptr);
    if (stats) stats->write(position_.step, *metrics_);
    if (is_due(config_.eval_every) && position_.step < config_.steps)
      metrics_->write({{"event", "eval"}, {"step", position_.step}, {"loss", evaluate()}});
    if (is_due(config_.save_every)) save();
    if (signals.seen()) {
      save();
      throw Interrupted("interrupted at step " + std::to_string(position_.step) +
                        "; 'moxie train --resume --out " + folder_.path + "' goes on");
    }
  }
  eval_loss_ = evaluate();
  // No step follows that would notice what the last one did.
  if (!std::isfinite(eval_loss_) && config_.on_nan == "stop")
    throw NotFinite("step " + std::to_string(position_.step) +
                    ": the held-out loss is not finite: " +
                    find_not_finite(*model_, optimizer_, windows(Text::kHeldOut, 0)));
  metrics_->write({{"event", "eval"}, {"step", position_.step}, {"loss", eval_loss_}});
  save();
  if (!config_.save_weights.empty()) save_weights(config_.save_weights, {*model_, optimizer_});
  progress_->show(position_.step, "held-out loss " + fixed(eval_loss_, 4));
  const auto tokens = static_cast<double>(position_.step * config_.tokens_per_step());
  const Result result{.steps = position_.step,
                      .parameters = model_->parameter_count(),
                      .eval_loss = eval_loss_,
                      .bigram_entropy = corpus_.bigram_entropy(),
                      .tokens_per_s = tokens / position_.seconds,
                      .seconds = position_.seconds,
                      .peak_memory_bytes = peak_memory_bytes(device_),
                      .device = describe(device_)};
  write_file(folder_.result(), to_json(result).dump(2) + "\n");
  return result;
}

}  // namespace

Json to_json(const Result& result) {
  return {{"steps", result.steps},
          {"parameters", result.parameters},
          {"eval_loss", result.eval_loss},
          {"bigram_entropy", result.bigram_entropy},
          {"tokens_per_s", result.tokens_per_s},
          {"seconds", result.seconds},
          {"peak_memory_bytes", result.peak_memory_bytes},
          {"device", result.device}};
}

Result train(Config config, Start start) {
  check(config);
  const RunFolder folder{config.out};
  MOXIE_CHECK(start == Start::kResume || !std::filesystem::exists(folder.config()), "'", config.out,
              "' holds a run already; --resume continues it, --out takes another folder");
  MOXIE_CHECK(config.eval_windows >= config.batch, "--eval-windows must be at least --batch, got ",
              config.eval_windows, " and ", config.batch);
  if (config.threads > 0) at::set_num_threads(static_cast<int>(config.threads));
  config.threads = at::get_num_threads();  // sums depend on it: a resumed run takes the same number
  std::filesystem::create_directories(config.out);
  const FolderLock lock(folder.lock());
  Run run(config, start);
  write_file(folder.config(), to_json(config).dump(2) + "\n");
  return run.train();
}

}  // namespace moxie::cli
