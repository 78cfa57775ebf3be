#include "moxie/cli/compare/plan.h"

#include <algorithm>
#include <cctype>
#include <map>

#include "moxie/cli/file/json.h"
#include "moxie/cli/file/mapped_file.h"
#include "moxie/cli/text.h"
#include "moxie/core/base/check.h"

namespace moxie::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kMostSeeds = 1000;
constexpr int kPlanDepth = 3;  // nesting of the JSON: plan, config, list of words
// The fields that each run sets itself. save_weights is one of them because all runs would write to
// the same file; their checkpoints hold the weights anyway.
constexpr std::string_view kOwnFields[] = {"recipe", "seed", "out", "title", "save_weights"};

// Splits one of --recipes into the words that --recipe of train takes:
// "experts=mxfp8_rceil+linears=bf16".
Words words_of(const std::string& recipe) {
  Words words;
  for (size_t start = 0; start <= recipe.size();) {
    const size_t end = std::min(recipe.find('+', start), recipe.size());
    MOXIE_CHECK(end > start, "--recipes: there is an empty word in '", recipe, "'");
    words.push_back(recipe.substr(start, end - start));
    start = end + 1;
  }
  return words;
}

std::string folder_of(const std::string& recipe, int64_t seed) {
  std::string name = recipe;
  for (char& c : name)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '_') c = '-';
  return name + "-seed" + std::to_string(seed);
}

}  // namespace

bool is_own_field(std::string_view name) {
  return std::find(std::begin(kOwnFields), std::end(kOwnFields), name) != std::end(kOwnFields);
}

std::vector<PlannedRun> runs_of(const Plan& plan) {
  MOXIE_CHECK(!plan.recipes.empty(), "--recipes must name at least one recipe");
  MOXIE_CHECK(plan.seeds >= 1 && plan.seeds <= kMostSeeds, "--seeds must be 1 to ", kMostSeeds,
              ", got ", plan.seeds);
  std::vector<PlannedRun> runs;
  std::map<std::string, std::string> recipe_of_folder;
  for (int64_t seed = 1; seed <= plan.seeds; ++seed)
    for (const std::string& recipe : plan.recipes) {
      PlannedRun run{.recipe = recipe,
                     .seed = seed,
                     .name = recipe + " seed " + std::to_string(seed),
                     .folder = folder_of(recipe, seed),
                     .config = plan.config};
      run.config.recipe = words_of(recipe);
      run.config.seed = seed;
      check(run.config);
      const auto [other, is_new] = recipe_of_folder.emplace(run.folder, recipe);
      MOXIE_CHECK(is_new, "--recipes: '", other->second, "' and '", recipe,
                  "' would both be trained in '", run.folder, "'");
      runs.push_back(std::move(run));
    }
  return runs;
}

Json to_json(const Plan& plan) {
  Json config = to_json(plan.config);
  for (const std::string_view name : kOwnFields) config.erase(std::string(name));
  return {{"recipes", plan.recipes}, {"seeds", plan.seeds}, {"config", std::move(config)}};
}

Plan read_plan(const std::string& path) {
  const MappedFile file(path);
  try {
    const Json json = parse_json(path, file.bytes(), {.deepest = kPlanDepth});
    return {.config = saved_config(json.at("config"), "'" + path + "'"),
            .recipes = json.at("recipes").get<Words>(),
            .seeds = integer_of(path, json, "seeds")};
  } catch (const nlohmann::json::exception& error) {
    fail("'", path, "' is no plan of moxie compare: ", printable(error.what()));
  }
}

}  // namespace moxie::cli
