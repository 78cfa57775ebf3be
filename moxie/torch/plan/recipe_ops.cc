// Ops that describe recipes and plans, for Python, the command line and tests.
#include <torch/library.h>

#include "moxie/torch/plan/explain.h"
#include "moxie/torch/view.h"

namespace moxie::ops {
namespace {

std::string recipe_text(std::string_view text) {
  return with_op("recipe", [&] { return to_text(parse_recipe(text, "recipe")); });
}

// Returns [kernel, a, b, reason] of each of the three passes, and
// [bytes kept of x, bytes kept of w].
std::tuple<std::vector<std::string>, std::vector<int64_t>> explain_op(
    std::string_view recipe, int64_t n, int64_t k, c10::Device device, int64_t rows,
    std::optional<int64_t> groups, at::ScalarType x, at::ScalarType w, bool needs_dx, bool needs_dw,
    bool main_grad) {
  return with_op("explain", [&] {
    const Explanation told = explain({.recipe = recipe,
                                      .n = n,
                                      .k = k,
                                      .device = device,
                                      .rows = rows,
                                      .groups = groups,
                                      .x = x,
                                      .w = w,
                                      .needs_dx = needs_dx,
                                      .needs_dw = needs_dw,
                                      .main_grad = main_grad});
    std::vector<std::string> text;
    for (const ExplainedPass& pass : told.passes)
      text.insert(text.end(), {pass.kernel, pass.a, pass.b, pass.reason});
    return std::tuple(text, std::vector<int64_t>{told.x_bytes, told.w_bytes});
  });
}

// For tests: how many recipes this process has parsed, and how many plans it has made.
std::vector<int64_t> counts() { return {recipes_parsed(), plans_made()}; }

void pretend_gpu_op(std::string_view kind, bool gpus_only) {
  with_op("pretend_gpu",
          [&] { pretend_gpu(kind, gpus_only ? PretendOn::kGpus : PretendOn::kEveryDevice); });
}

}  // namespace

TORCH_LIBRARY_IMPL(moxie, CompositeExplicitAutograd, m) {
  m.impl("_recipe", TORCH_FN(recipe_text));
  m.impl("_recipe_names", TORCH_FN(recipe_names));
  m.impl("_explain", TORCH_FN(explain_op));
  m.impl("_counts", TORCH_FN(counts));
  m.impl("_pretend_gpu", TORCH_FN(pretend_gpu_op));
}

}  // namespace moxie::ops
