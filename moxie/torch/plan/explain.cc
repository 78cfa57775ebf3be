#include "moxie/torch/plan/explain.h"

#include <limits>

#include "moxie/core/base/check.h"
#include "moxie/core/layout/check_args.h"
#include "moxie/core/layout/shape.h"

namespace moxie::ops {
namespace {

constexpr const char* kOp = "explain";

int64_t elements(const Shape& shape) {
  int64_t count = 1;
  for (int i = 0; i < shape.dims; ++i) count *= shape[i];
  return count;
}

// The bytes of one form of a quantized tensor, its scales included.
int64_t bytes_of(const Recipe& recipe, const Shape& of, std::optional<int64_t> groups,
                 FormAndBlock as, ScaleLayout layout) {
  const bool by_row = recipe.scaling == Scaling::kRow;
  const auto shape = by_row ? row_scale_shape<int64_t>(of, groups, as.form)
                            : operand_shape<int64_t>(of, groups, as.form, as.block, layout);
  return elements(shape.qdata) + elements(shape.scale) * (by_row ? 4 : 1);
}

int64_t x_bytes(const Plan& plan, const ExplainArgs& args) {
  const Shape x{args.rows, args.k};
  switch (plan.kept_x) {
    case KeptX::kNothing: return 0;
    case KeptX::kColwise:
      return bytes_of(plan.recipe, x, args.groups, form_of_b(plan.recipe, Pass::kWgrad),
                      plan.layout);
    case KeptX::kHighPrecision: break;
    case KeptX::kQuantizedX: fail(kOp, ": x does not come quantized here");
  }
  return elements(x) * (plan.recipe.keeps_dtype ? c10::elementSize(args.x) : 2);
}

int64_t w_bytes(const Plan& plan, const ExplainArgs& args) {
  if (plan.kept_w != KeptW::kTransposed) return 0;  // the model keeps w itself anyway
  const Shape w{args.groups.value_or(1), args.n, args.k};
  if (plan.recipe.quantizes())
    return bytes_of(plan.recipe, w, {}, form_of_b(plan.recipe, Pass::kDgrad), plan.layout);
  const bool as_it_is = plan.recipe.keeps_dtype || args.w == at::kBFloat16;
  return as_it_is ? 0 : elements(w) * 2;
}

std::string dtype_text(at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? "bf16" : dtype == at::kFloat ? "f32" : c10::toString(dtype);
}

bool is_quantized(const Recipe& recipe, Pass pass) {
  return pass == Pass::kWgrad ? recipe.quantizes_wgrad() : recipe.quantizes();
}

std::string operand_text(const Plan& plan, const char* name, Pass pass, FormAndBlock as,
                         const ExplainArgs& args) {
  const std::string of = std::string(name) + " ";
  if (!is_quantized(plan.recipe, pass))
    return of + dtype_text(plan.recipe.keeps_dtype ? args.x : at::kBFloat16);
  if (plan.recipe.scaling == Scaling::kRow)
    return of + (as.form == Form::kRowwise ? "e4m3, a scale per row" : "e4m3, a scale per column");
  return of + "e4m3 " + moxie::name(as.block) + " " + moxie::name(plan.layout);
}

ExplainedPass explained(const Plan& plan, Pass pass, const PlanArgs& problem,
                        const ExplainArgs& args) {
  constexpr const char* kNames[3][2] = {{"x", "w"}, {"dy", "w_t"}, {"dy_t", "x_t"}};
  const auto& names = kNames[static_cast<size_t>(pass)];
  const Kernel kernel = plan.kernel(pass);
  const bool decodes = is_quantized(plan.recipe, pass) && !multiplies_fp8(kernel);
  return {.pass = pass,
          .kernel = std::string(decodes ? "decode, " : "") + name(kernel),
          .a = operand_text(plan, names[0], pass, form_of_a(plan.recipe, pass), args),
          .b = operand_text(plan, names[1], pass, form_of_b(plan.recipe, pass), args),
          .reason = reason(problem, plan.why(pass))};
}

// Throws if the op itself would refuse tensors of these sizes, dtypes and device.
void check(const ExplainArgs& args, const Recipe& recipe) {
  constexpr int64_t kMostSize = std::numeric_limits<int32_t>::max();
  for (const auto& [name, size] :
       {std::pair{"n", args.n}, std::pair{"k", args.k}, std::pair{"rows", args.rows}})
    MOXIE_CHECK(size >= 0 && size <= kMostSize, kOp, ": ", name, " must be 0 to 2^31 - 1, got ",
                size);
  const int64_t groups = args.groups.value_or(1);
  MOXIE_CHECK(groups >= 1 && groups <= kMaxGroups, kOp, ": groups must be 1 to ", kMaxGroups,
              ", got ", groups);
  MOXIE_CHECK(args.device.is_cpu() || args.device.is_cuda(), kOp,
              ": device must be a CPU or a GPU of CUDA, got ", args.device.str());
  for (const auto& [name, dtype] : {std::pair{"dtype", args.x}, std::pair{"weight_dtype", args.w}})
    MOXIE_CHECK(recipe.keeps_dtype || dtype == at::kBFloat16 || dtype == at::kFloat, kOp, ": ",
                name, " must be bfloat16 or float32, got ", c10::toString(dtype));
}

}  // namespace

Explanation explain(const ExplainArgs& args) {
  const Recipe recipe = parse_recipe(args.recipe, kOp);
  check(args, recipe);
  const PlanArgs problem{.recipe = recipe,
                         .device = args.device,
                         .rows = args.rows,
                         .groups = args.groups.value_or(1),
                         .n = args.n,
                         .k = args.k,
                         .has_offs = args.groups.has_value(),
                         .x = args.x,
                         .y = recipe.out.value_or(args.x),
                         .dx = args.x,
                         .dw = args.main_grad ? at::kFloat : args.w,
                         .needs_dx = args.needs_dx,
                         .needs_dw = args.needs_dw,
                         .adds_to_main_grad = args.main_grad};
  const Plan plan = decide(problem);
  return {.recipe = to_text(recipe),
          .passes = {explained(plan, Pass::kForward, problem, args),
                     explained(plan, Pass::kDgrad, problem, args),
                     explained(plan, Pass::kWgrad, problem, args)},
          .x_bytes = x_bytes(plan, args),
          .w_bytes = w_bytes(plan, args)};
}

std::ostream& operator<<(std::ostream& out, const Explanation& explanation) {
  out << explanation.recipe << '\n';
  for (const ExplainedPass& pass : explanation.passes) {
    out << name(pass.pass) << ": " << pass.kernel << " (" << pass.a << ", " << pass.b << ")";
    if (!pass.reason.empty()) out << "; " << pass.reason;
    out << '\n';
  }
  return out << "kept for backward: " << explanation.x_bytes << " bytes of x, "
             << explanation.w_bytes << " bytes of w\n";
}

}  // namespace moxie::ops
