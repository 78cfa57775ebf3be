#include "moxie/torch/convert.h"

#include <regex.h>  // POSIX: <regex> and its locales crash where two C++ libraries are loaded
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <memory>

#include "moxie/torch/nn/quantizable.h"
#include "moxie/torch/recipe.h"
#include "moxie/torch/view.h"

namespace moxie {
namespace {

constexpr const char* kOp = "quantize";
constexpr std::string_view kPattern = "re:";
constexpr size_t kShown = 60;  // how many characters of a pattern a message shows

// Why a pattern is refused, or nullptr if it is allowed. regcomp() recurses for each parenthesis
// and expands braces, and regexec() tries every way to match a back-reference, so a pattern could
// exhaust the stack, memory or time.
const char* why_refused(std::string_view regex) {
  constexpr size_t kLongest = 1000;
  constexpr int kDeepest = 32;
  if (regex.size() > kLongest) return "it is longer than 1000 characters";
  if (regex.find('\0') != regex.npos) return "it has a zero byte";
  int depth = 0;
  for (size_t i = 0; i < regex.size(); ++i) {
    if (regex[i] == '\\' && i + 1 < regex.size()) {
      if (regex[++i] >= '1' && regex[i] <= '9') return "it has a back-reference";
    } else if (regex[i] == '(' && ++depth > kDeepest) {
      return "its parentheses are nested more than 32 deep";
    } else if (regex[i] == ')') {
      --depth;
    } else if (regex[i] == '{') {
      return "it has braces, as in a{2,3}; say the repetition in other words";
    }
  }
  return nullptr;
}

class Pattern {
 public:
  explicit Pattern(const std::string& key) : key_(key) {
    is_regex_ = key.starts_with(kPattern);
    if (!is_regex_) return;
    const char* const refused = why_refused(std::string_view(key).substr(kPattern.size()));
    TORCH_CHECK_VALUE(refused == nullptr, kOp, ": 're:", key.substr(kPattern.size(), kShown),
                      key.size() > kPattern.size() + kShown ? ".." : "",
                      "' is refused as a regular expression: ", refused);
    const std::string whole = "^(" + key.substr(kPattern.size()) + ")$";
    compiled_ = std::shared_ptr<regex_t>(new regex_t{}, [](regex_t* regex) {
      regfree(regex);
      delete regex;
    });
    const int status = regcomp(compiled_.get(), whole.c_str(), REG_EXTENDED | REG_NOSUB);
    if (status == 0) return;
    char message[256];
    regerror(status, compiled_.get(), message, sizeof(message));
    TORCH_CHECK_VALUE(false, kOp, ": '", key, "' is no regular expression: ", message);
  }

  bool is_regex() const { return is_regex_; }
  bool matches(const std::string& name) const {
    if (!is_regex_) return name == key_;
    return regexec(compiled_.get(), name.c_str(), 0, nullptr, 0) == 0;
  }

 private:
  std::string key_;
  bool is_regex_;
  std::shared_ptr<regex_t> compiled_;
};

struct Rule {
  Pattern pattern;
  const NameToRecipe::value_type& entry;
  bool matched = false;
};

// Finds the rule for a module's name: an exact match, else the first pattern that matches. Marks
// all rules that match, so that only those that match no module are errors.
Rule* find_rule(std::vector<Rule>& rules, const std::string& name) {
  Rule* found = nullptr;
  for (Rule& rule : rules) {
    if (!rule.pattern.matches(name)) continue;
    rule.matched = true;
    if (!found || (found->pattern.is_regex() && !rule.pattern.is_regex())) found = &rule;
  }
  return found;
}

// Lists names for an error message.
std::string listed(const std::vector<std::string>& names) {
  constexpr size_t kShown = 8;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i)
    text += (i == 0 ? "" : ", ") + names[i];
  if (names.size() > kShown) text += ", and " + std::to_string(names.size() - kShown) + " more";
  return names.empty() ? "the model has none" : "the model has " + text;
}

}  // namespace

std::vector<Converted> quantize(torch::nn::Module& model, const NameToRecipe& recipes) {
  std::vector<Rule> rules;
  for (const auto& entry : recipes) {
    if (entry.second) ops::with_op(kOp, [&] { ops::parse_recipe(entry.second->recipe, kOp); });
    rules.push_back({Pattern(entry.first), entry});
  }
  struct Step {
    nn::Quantizable* module;
    std::string name;
    const ModuleRecipe& given;
  };
  std::vector<Step> plan;
  std::vector<std::string> names;
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    auto* const module = dynamic_cast<nn::Quantizable*>(item.value().get());
    const bool is_stock = item.value()->as<torch::nn::Linear>() != nullptr;
    if (!module && !is_stock) continue;
    if (module) names.push_back(item.key());
    const Rule* const rule = find_rule(rules, item.key());
    if (!rule || !rule->entry.second) continue;
    TORCH_CHECK_VALUE(
        module, kOp, ": '", item.key(),
        "' is a torch::nn::Linear, which its owner holds as that type, so it cannot be "
        "replaced; declare it as moxie::nn::MxLinear, whose parameters have the same "
        "names, or leave it alone with nullopt");
    plan.push_back({module, item.key(), *rule->entry.second});
  }
  for (const Rule& rule : rules)
    TORCH_CHECK_VALUE(rule.matched, kOp, ": no module that can take a recipe is called '",
                      rule.entry.first, "'; ", listed(names));
  std::vector<Converted> report;
  for (const auto& [module, name, given] : plan) {
    module->set_recipe(given.recipe);
    if (given.weight_cache) module->set_weight_cache(*given.weight_cache);
    report.push_back({name, given.recipe});
  }
  return report;
}

void refresh(torch::nn::Module& model) {
  for (const auto& module : model.modules())
    if (auto* const quantizable = dynamic_cast<nn::Quantizable*>(module.get()))
      quantizable->refresh();
}

}  // namespace moxie
