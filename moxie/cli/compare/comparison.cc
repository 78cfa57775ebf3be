#include "moxie/cli/compare/comparison.h"

#include <algorithm>
#include <cmath>

#include "moxie/cli/text.h"
#include "moxie/core/base/check.h"

namespace moxie::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kLossDigits = 4, kPercentDigits = 2;

std::string percent(double value) {
  if (!std::isfinite(value)) return fixed(value, kPercentDigits);
  return std::string(value < 0 ? "" : "+") + fixed(value, kPercentDigits) + " %";
}

template <class Value>
std::vector<double> each(const ComparedRecipe& recipe, Value value) {
  std::vector<double> values;
  for (const ComparedRun& run : recipe.runs) values.push_back(value(run));
  return values;
}

void summarize(ComparedRecipe& recipe) {
  const auto differences = each(recipe, [](const ComparedRun& run) { return run.difference; });
  recipe.eval_loss = mean(each(recipe, [](const auto& run) { return run.result.eval_loss; }));
  recipe.tokens_per_s = mean(each(recipe, [](const auto& run) { return run.result.tokens_per_s; }));
  recipe.difference = mean(differences);
  recipe.interval = interval_of_mean(differences);
  for (const ComparedRun& run : recipe.runs)
    recipe.peak_memory_bytes = std::max(recipe.peak_memory_bytes, run.result.peak_memory_bytes);
}

Json json_of(const ComparedRun& run) {
  const Result& result = run.result;
  return {{"seed", run.run.seed},          {"folder", run.run.folder},
          {"eval_loss", result.eval_loss}, {"difference_percent", run.difference},
          {"steps", result.steps},         {"tokens_per_s", result.tokens_per_s},
          {"seconds", result.seconds},     {"peak_memory_bytes", result.peak_memory_bytes}};
}

Json json_of(const ComparedRecipe& recipe) {
  Json interval = nullptr;
  if (recipe.interval) interval = {recipe.interval->low, recipe.interval->high};
  Json runs = Json::array();
  for (const ComparedRun& run : recipe.runs) runs.push_back(json_of(run));
  return {{"recipe", recipe.recipe},
          {"eval_loss", recipe.eval_loss},
          {"difference_percent", recipe.difference},
          {"interval_percent", std::move(interval)},
          {"tokens_per_s", recipe.tokens_per_s},
          {"peak_memory_bytes", recipe.peak_memory_bytes},
          {"runs", std::move(runs)}};
}

// Checks that two runs read the same text: the files may have changed between the runs.
void check_text(const ComparedRun& run, const ComparedRun& first) {
  const auto check = [&](const auto& is, const auto& should_be, const char* what) {
    MOXIE_CHECK(is == should_be, "compare: ", run.run.recipe, " of seed ", run.run.seed,
                " read other text than ", first.run.recipe, " of seed ", first.run.seed, ": the ",
                what, " is ", is, ", not ", should_be);
  };
  const Result &result = run.result, &of_first = first.result;
  if (!result.data_fingerprint.empty() && !of_first.data_fingerprint.empty())
    check(result.data_fingerprint, of_first.data_fingerprint, "fingerprint");
  check(result.bigram_entropy, of_first.bigram_entropy, "bigram entropy of what it held out");
}

}  // namespace

Comparison compare(const Plan& plan, const std::vector<ComparedRun>& runs) {
  MOXIE_CHECK(!runs.empty(), "compare: there are no runs");
  Comparison comparison{.plan = plan,
                        .recipes = {},
                        .bigram_entropy = runs.front().result.bigram_entropy,
                        .device = runs.front().result.device};
  for (const ComparedRun& run : runs) check_text(run, runs.front());
  for (const std::string& recipe : plan.recipes) {
    ComparedRecipe& compared = comparison.recipes.emplace_back();
    compared.recipe = recipe;
    for (const ComparedRun& run : runs)
      if (run.run.recipe == recipe) compared.runs.push_back(run);
    std::sort(compared.runs.begin(), compared.runs.end(),
              [](const auto& a, const auto& b) { return a.run.seed < b.run.seed; });
    const std::vector<ComparedRun>& base = comparison.recipes.front().runs;
    MOXIE_CHECK(compared.runs.size() == base.size(), "compare: '", recipe, "' has ",
                compared.runs.size(), " runs, '", plan.recipes.front(), "' has ", base.size());
    for (size_t i = 0; i < base.size(); ++i) {
      const double loss = base[i].result.eval_loss;
      compared.runs[i].difference = 100 * (compared.runs[i].result.eval_loss - loss) / loss;
    }
    summarize(compared);
  }
  return comparison;
}

std::string text_of(const Comparison& comparison) {
  Table table(
      {"recipe", "held-out loss", "difference", "95 % interval", "tokens/s", "peak memory"});
  for (const ComparedRecipe& recipe : comparison.recipes) {
    const bool is_base = &recipe == &comparison.recipes.front();
    const std::optional<Interval>& interval = recipe.interval;
    table.add(
        {recipe.recipe, fixed(recipe.eval_loss, kLossDigits),
         is_base ? "base" : percent(recipe.difference),
         is_base || !interval ? "-" : percent(interval->low) + " to " + percent(interval->high),
         human_count(recipe.tokens_per_s),
         human_bytes(static_cast<double>(recipe.peak_memory_bytes))});
  }
  const int64_t seeds = comparison.plan.seeds;
  std::string text = table.text() + "\n";
  text += "Bigram entropy of the held-out text: " + fixed(comparison.bigram_entropy, kLossDigits) +
          ". Losses are in nats per byte, means over " + std::to_string(seeds) +
          (seeds == 1 ? " seed" : " seeds, and the differences are paired by seed") + ".\n";
  if (comparison.on_cpu()) text += "This ran on a CPU: it shows numerics, not speed.\n";
  return text;
}

Json to_json(const Comparison& comparison) {
  Json recipes = Json::array();
  for (const ComparedRecipe& recipe : comparison.recipes) recipes.push_back(json_of(recipe));
  const Result& first = comparison.recipes.front().runs.front().result;
  Json json = {{"base", comparison.recipes.front().recipe},
               {"seeds", comparison.plan.seeds},
               {"confidence", kConfidence},
               {"bigram_entropy", comparison.bigram_entropy},
               {"device", comparison.device},
               {"numerics_only", comparison.on_cpu()},
               {"parameters", first.parameters},
               {"recipes", std::move(recipes)}};
  json["config"] = to_json(comparison.plan).at("config");
  return json;
}

// These conditions are written so that NaN does not pass: a recipe passes only if its value is
// known to be low enough.
Words recipes_above(const Comparison& comparison, double percent_allowed) {
  Words lines;
  for (size_t i = 1; i < comparison.recipes.size(); ++i) {
    const ComparedRecipe& recipe = comparison.recipes[i];
    if (recipe.interval && recipe.interval->high <= percent_allowed) continue;
    const std::string& base = comparison.recipes.front().recipe;
    const double high = recipe.interval ? recipe.interval->high : NAN;
    lines.push_back(std::isfinite(high)
                        ? "the loss of " + recipe.recipe + " may be " +
                              fixed(high, kPercentDigits) + " % above " + base +
                              "'s (upper end of the 95 % interval), " +
                              fixed(high - percent_allowed, kPercentDigits) + " % more than the " +
                              short_number(percent_allowed) + " % allowed"
                        : "the loss of " + recipe.recipe +
                              " has no finite interval of its difference to " + base + "'s");
  }
  return lines;
}

Words recipes_not_learned(const Comparison& comparison) {
  Words lines;
  for (const ComparedRecipe& recipe : comparison.recipes)
    if (!(recipe.eval_loss < comparison.bigram_entropy))
      lines.push_back("the loss of " + recipe.recipe + " is " +
                      fixed(recipe.eval_loss, kLossDigits) +
                      ", not below the bigram entropy of the text, " +
                      fixed(comparison.bigram_entropy, kLossDigits));
  return lines;
}

}  // namespace moxie::cli
