#include "moxie/torch/recipe.h"

#include <atomic>

#include "moxie/core/base/check.h"
#include "moxie/core/layout/parse.h"

namespace moxie::ops {
namespace {

std::atomic<int64_t> parse_count = 0;

struct Preset {
  const char* name;
  Recipe recipe;
};

const Preset kPresets[] = {
    {"bf16", {.scaling = Scaling::kNone}},
    {"fp8_rowwise", {.scaling = Scaling::kRow}},
    {"mxfp8_rceil", {.rule = ScaleRule::kRceil}},
    {"mxfp8_floor", {.rule = ScaleRule::kFloor}},
    {"mxfp8_rceil_wgrad_with_hp", {.wgrad = Wgrad::kHighPrecision}},
    {"mxfp8_emulated_rceil", {.rule = ScaleRule::kRceil, .kernels = Kernels::kEmulated}},
    {"mxfp8_emulated_floor", {.rule = ScaleRule::kFloor, .kernels = Kernels::kEmulated}},
    {"mxfp8_emulated_ceil", {.rule = ScaleRule::kCeil, .kernels = Kernels::kEmulated}},
    {"mxfp8_emulated_even", {.rule = ScaleRule::kEven, .kernels = Kernels::kEmulated}},
    {"mxfp8_rceil_32x32", {.weights = {32, 32}}},
    {"mxfp8_rceil_128",
     {.activations = {1, 128}, .weights = {128, 128}, .wgrad_dy = {128, 1}, .wgrad_x = {128, 32}}},
    // For tests: identity, which quantizes nothing, for gradcheck; and broken_scales, which a check
    // of convergence must reject.
    {"identity", {.scaling = Scaling::kNone, .keeps_dtype = true}},
    {"broken_scales",
     {.activations = {1, 128},
      .weights = {128, 128},
      .wgrad_dy = {128, 1},
      .wgrad_x = {128, 32},
      .scales_too_small = true}},
};

bool parse_bool(std::string_view text, std::string_view op, std::string_view field) {
  if (text == "true") return true;
  if (text == "false") return false;
  fail(op, ": recipe field ", field, " must be true or false, got '", text, "'");
}

std::optional<at::ScalarType> parse_out(std::string_view text, std::string_view op) {
  if (text == "bfloat16") return at::kBFloat16;
  if (text == "float32") return at::kFloat;
  if (text == "input") return std::nullopt;
  fail(op, ": recipe field out must be bfloat16, float32 or input, got '", text, "'");
}

void set_field(Recipe& recipe, std::string_view field, std::string_view text, std::string_view op) {
  const std::string argument = "recipe field " + std::string(field);
  if (field == "rule") {
    recipe.rule = parse_rule(text, op);
  } else if (field == "activations") {
    recipe.activations = parse_block(text, op, argument);
  } else if (field == "weights") {
    recipe.weights = parse_block(text, op, argument);
  } else if (field == "wgrad_dy") {
    recipe.wgrad_dy = parse_block(text, op, argument);
  } else if (field == "wgrad_x") {
    recipe.wgrad_x = parse_block(text, op, argument);
  } else if (field == "wgrad_with_hp") {
    recipe.wgrad = parse_bool(text, op, field) ? Wgrad::kHighPrecision : Wgrad::kQuantized;
  } else if (field == "kernels") {
    MOXIE_CHECK(text == "auto" || text == "emulated", op,
                ": recipe field kernels must be auto or emulated, got '", text, "'");
    recipe.kernels = text == "auto" ? Kernels::kAuto : Kernels::kEmulated;
  } else if (field == "keep_w") {
    recipe.keep_w = parse_bool(text, op, field);
  } else if (field == "out") {
    recipe.out = parse_out(text, op);
  } else {
    fail(op, ": a recipe has no field '", field,
         "'; there are rule, activations, weights, wgrad_dy, wgrad_x, wgrad_with_hp, kernels, "
         "keep_w, out");
  }
}

// Checks that the fields of a recipe fit together. A recipe that does not scale blocks must have
// the preset's values in all fields that concern blocks.
void check_recipe(const Recipe& recipe, const Recipe& preset, std::string_view op) {
  if (recipe.scaling != Scaling::kBlock) {
    const Recipe& a = recipe;
    MOXIE_CHECK(a.rule == preset.rule && a.activations == preset.activations &&
                    a.weights == preset.weights && a.wgrad_dy == preset.wgrad_dy &&
                    a.wgrad_x == preset.wgrad_x,
                op,
                ": this recipe has no blocks, so rule, activations, weights, wgrad_dy and "
                "wgrad_x cannot be set");
    MOXIE_CHECK(recipe.scaling == Scaling::kRow || a.wgrad == Wgrad::kQuantized, op,
                ": this recipe quantizes nothing, so wgrad_with_hp cannot be set");
    return;
  }
  MOXIE_CHECK(recipe.activations.rows == 1, op,
              ": recipe field activations must be one row tall (1x32 or 1x128), as blocks must not "
              "reach into another group, got ",
              name(recipe.activations));
  MOXIE_CHECK(is_operand_block(recipe.weights, Form::kRowwise), op,
              ": recipe field weights must span at least 32 columns, which forward contracts, got ",
              name(recipe.weights));
  for (const auto& [field, block] :
       {std::pair{"wgrad_dy", recipe.wgrad_dy}, std::pair{"wgrad_x", recipe.wgrad_x}})
    MOXIE_CHECK(is_operand_block(block, Form::kColwise), op, ": recipe field ", field,
                " must span at least 32 rows, which wgrad contracts, got ", name(block));
  MOXIE_CHECK(recipe.wgrad_dy.rows == recipe.wgrad_x.rows, op,
              ": recipe fields wgrad_dy and wgrad_x must have as many rows, because each group is "
              "padded to them, got ",
              name(recipe.wgrad_dy), " and ", name(recipe.wgrad_x));
}

const Preset& find_preset(std::string_view text, std::string_view op) {
  for (const Preset& preset : kPresets)
    if (preset.name == text) return preset;
  std::string all;
  for (const auto& one : recipe_names()) all += (all.empty() ? "" : ", ") + one;
  fail(op, ": there is no recipe '", text, "'; there are ", all);
}

}  // namespace

std::vector<std::string> recipe_names() {
  std::vector<std::string> names;
  for (const Preset& preset : kPresets)
    if (!preset.recipe.keeps_dtype && !preset.recipe.scales_too_small)
      names.emplace_back(preset.name);
  return names;
}

int64_t recipes_parsed() { return parse_count.load(); }

Recipe parse_recipe(std::string_view text, std::string_view op) {
  ++parse_count;
  const size_t colon = text.find(':');
  const Preset& preset = find_preset(text.substr(0, colon), op);
  Recipe recipe = preset.recipe;
  std::string_view rest = colon == text.npos ? "" : text.substr(colon + 1);
  while (!rest.empty()) {
    const size_t comma = rest.find(',');
    const std::string_view field = rest.substr(0, comma);
    const size_t equals = field.find('=');
    MOXIE_CHECK(equals != field.npos, op, ": a recipe's fields are written name=value, got '",
                field, "'");
    set_field(recipe, field.substr(0, equals), field.substr(equals + 1), op);
    rest = comma == rest.npos ? "" : rest.substr(comma + 1);
  }
  check_recipe(recipe, preset.recipe, op);
  return recipe;
}

std::string to_text(const Recipe& recipe) {
  const std::string kernels = recipe.kernels == Kernels::kAuto ? "auto" : "emulated";
  const std::string out = !recipe.out                 ? "input"
                          : *recipe.out == at::kFloat ? "float32"
                                                      : "bfloat16";
  // Only if it is false, so that the text of a recipe that was saved before this field existed is
  // still the text of that recipe.
  const std::string keep_w = recipe.keep_w ? "" : ",keep_w=false";
  const std::string ends = "kernels=" + kernels + ",out=" + out + keep_w;
  const std::string hp = recipe.wgrad == Wgrad::kHighPrecision ? "true" : "false";
  switch (recipe.scaling) {
    case Scaling::kNone: return (recipe.keeps_dtype ? "identity:" : "bf16:") + ends;
    case Scaling::kRow: return "fp8_rowwise:wgrad_with_hp=" + hp + "," + ends;
    case Scaling::kBlock: break;
  }
  return (recipe.scales_too_small ? "broken_scales:rule=" : "mxfp8_rceil:rule=") +
         std::string(name(recipe.rule)) + ",activations=" + name(recipe.activations) +
         ",weights=" + name(recipe.weights) + ",wgrad_dy=" + name(recipe.wgrad_dy) +
         ",wgrad_x=" + name(recipe.wgrad_x) + ",wgrad_with_hp=" + hp + "," + ends;
}

}  // namespace moxie::ops
