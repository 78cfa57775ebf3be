#include "moxie/torch/plan/plan.h"

#include <atomic>

#include "moxie/core/base/check.h"
#include "moxie/core/base/device.h"
#include "moxie/core/layout/shape.h"
#include "moxie/torch/warn.h"

namespace moxie::ops {
namespace {

constexpr int kHopper = 90, kNoFp8Kernels = 1, kNotPretended = 0;
std::atomic<int> pretended = kNotPretended;
std::atomic<PretendOn> pretended_on = PretendOn::kEveryDevice;
std::atomic<int64_t> plan_count = 0;

bool pretends(c10::Device device) {
  if (pretended.load() == kNotPretended) return false;
  return device.is_cuda() || pretended_on.load() == PretendOn::kEveryDevice;
}

// Compute capability, major * 10 + minor; 0 on a CPU.
int capability_of(c10::Device device) {
  if (pretends(device)) return pretended.load();
  return device.is_cuda() ? compute_capability(device.index()) : 0;
}

int64_t value(const c10::SymInt& size) { return size.guard_int(__FILE__, __LINE__); }

// Whether size < limit. A size that torch.compile does not know is assumed to be less.
bool is_less(const c10::SymInt& size, int64_t limit) {
  return size.sym_lt(limit).guard_or_true(__FILE__, __LINE__);
}

bool are_multiples(const PlanArgs& args, int64_t of) {
  const int64_t n = value(args.n), k = value(args.k);
  return n > 0 && k > 0 && n % of == 0 && k % of == 0;
}

constexpr int64_t kMostTorchGroups = 1023;  // the limit of torch's grouped kernels

at::ScalarType result_of(const PlanArgs& args, Pass pass) {
  switch (pass) {
    case Pass::kForward: return args.y;
    case Pass::kDgrad: return args.dx;
    case Pass::kWgrad: break;
  }
  return args.dw;
}

bool has_cuda_kernel(at::ScalarType dtype) { return dtype == at::kFloat || dtype == at::kBFloat16; }

Kernel high_precision_kernel(const PlanArgs& args, Pass pass) {
  if (!args.device.is_cuda()) return Kernel::kMm;
  const auto operand = args.recipe.keeps_dtype ? args.x : at::kBFloat16;
  const auto result = result_of(args, pass);
  const bool adds = pass == Pass::kWgrad && args.adds_to_main_grad;
  if (!args.has_offs && !adds && operand == result) return Kernel::kMm;
  if (!has_cuda_kernel(operand) || !has_cuda_kernel(result)) return Kernel::kMasked;
  constexpr int64_t kRowOf16Bytes = 8;  // torch needs rows of whole 16 bytes, and bf16 has 2
  const bool taken = args.has_offs && !adds && operand == at::kBFloat16 &&
                     result == at::kBFloat16 && are_multiples(args, kRowOf16Bytes) &&
                     is_less(args.groups, kMostTorchGroups + 1);
  return taken ? Kernel::kTorchGrouped : Kernel::kProduct;
}

struct Choice {
  Kernel kernel;
  Why why = Why::kFastest;
};
constexpr Choice not_fp8(Why why) { return {Kernel::kMm, why}; }

// Whether Hopper's kernel can address the operands and the result. TMA coordinates are int32, and
// count bytes along k and along the columns of a result. The margin of 1024 is more than a tile
// reaches past the end.
bool fits_sm90(const PlanArgs& args, Pass pass) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 1024, kMostColumns = (int64_t{1} << 30) - 1024;
  const c10::SymInt rows =
      pass == Pass::kWgrad ? padded_rows(args.rows, args.groups, 128) : args.rows;
  return is_less(rows, kMost) && is_less(args.groups * args.n, kMost) &&
         is_less(args.groups * args.k, kMost) && is_less(args.n, kMostColumns) &&
         is_less(args.k, kMostColumns);
}

bool is_less_than_most_groups(const PlanArgs& args) {
  return is_less(args.groups, kMostTorchGroups + 1);
}

Choice choose_on_hopper(const PlanArgs& args, Pass pass) {
  const Recipe& recipe = args.recipe;
  constexpr int64_t kRow = 16;  // FP8 kernels load and store 16 bytes at a time
  if (recipe.scaling == Scaling::kRow) {
    if (!are_multiples(args, kRow)) return not_fp8(Why::kMultiples);
    if (!is_less_than_most_groups(args)) return not_fp8(Why::kGroups);
    const bool adds = pass == Pass::kWgrad && args.adds_to_main_grad;
    if (adds || result_of(args, pass) != at::kBFloat16) return not_fp8(Why::kResult);
    return {Kernel::kSm90Rows};
  }
  if (recipe.activations != Block{1, 128} || recipe.weights != Block{128, 128})
    return not_fp8(Why::kScalePer32);
  if (!are_multiples(args, kRow)) return not_fp8(Why::kMultiples);
  const bool own_wgrad = recipe.wgrad_dy == Block{128, 1} && recipe.wgrad_x == Block{128, 32};
  if (pass == Pass::kWgrad && !own_wgrad) return not_fp8(Why::kBlocks);
  if (!fits_sm90(args, pass)) return not_fp8(Why::kSize);
  return {Kernel::kSm90};
}

Choice choose_on_blackwell(const PlanArgs& args) {
  if (args.recipe.scaling == Scaling::kRow) return not_fp8(Why::kRowsOnHopper);
  if (!are_multiples(args, kMxBlock)) return not_fp8(Why::kMultiples);
  if (!is_less_than_most_groups(args)) return not_fp8(Why::kGroups);
  return {Kernel::kSm100};
}

Choice choose_fp8(const PlanArgs& args, Pass pass) {
  const Recipe& recipe = args.recipe;
  if (!recipe.quantizes()) return not_fp8(Why::kQuantizesNothing);
  if (pass == Pass::kWgrad && !recipe.quantizes_wgrad()) return not_fp8(Why::kHighPrecision);
  if (recipe.kernels == Kernels::kEmulated) return not_fp8(Why::kAskedFor);
  const int capability = capability_of(args.device);
  if (capability == kHopper) return choose_on_hopper(args, pass);
  if (capability / 10 == 10) return choose_on_blackwell(args);
  return not_fp8(args.device.is_cuda() ? Why::kCapability : Why::kCpu);
}

Choice choose(const PlanArgs& args, Pass pass) {
  Choice choice = choose_fp8(args, pass);
  if (!multiplies_fp8(choice.kernel)) choice.kernel = high_precision_kernel(args, pass);
  return choice;
}

// Whether all blocks of the recipe have this length along the contraction.
bool has_blocks_of(int length, const Recipe& recipe) {
  return recipe.scaling == Scaling::kBlock && recipe.activations.cols == length &&
         recipe.weights.cols == length && recipe.weights_t().rows == length &&
         recipe.wgrad_dy.rows == length && recipe.wgrad_x.rows == length;
}

// The layout of scales that suits the kernel of forward:
//   sm90             quads, if all blocks are 128 long along the contraction; else plain, which are
//                    converted for each GEMM
//   sm90_rows        plain
//   sm100            swizzled
//   decode on a GPU  swizzled, if all blocks are 32 long: kernels write and read those faster
//                    (docs/kernels/quantize.md); larger blocks repeat their scales and gain little
//   decode on a CPU  plain
ScaleLayout layout_of(const PlanArgs& args, Kernel forward) {
  const auto if_blocks_of = [&](int length, ScaleLayout layout) {
    return has_blocks_of(length, args.recipe) ? layout : ScaleLayout::kPlain;
  };
  if (forward == Kernel::kSm90) return if_blocks_of(kQuadBlock, ScaleLayout::kQuads);
  if (forward == Kernel::kSm90Rows) return ScaleLayout::kPlain;
  if (forward == Kernel::kSm100) return ScaleLayout::kSwizzled;
  const bool on_gpu = args.device.is_cuda() || pretends(args.device);
  return on_gpu ? if_blocks_of(kMxBlock, ScaleLayout::kSwizzled) : ScaleLayout::kPlain;
}

KeptX kept_x_of(const PlanArgs& args) {
  if (!args.needs_dw) return KeptX::kNothing;
  if (args.quantized_x) return KeptX::kQuantizedX;
  return args.recipe.quantizes_wgrad() ? KeptX::kColwise : KeptX::kHighPrecision;
}

KeptW kept_w_of(const PlanArgs& args) {
  if (!args.needs_dx) return KeptW::kNothing;
  // A cache has both forms already, and the form of a w that was made for the call is smaller than
  // that w.
  const bool keeps_form = args.recipe.keep_w || args.cached_w || !args.w_stays;
  return keeps_form ? KeptW::kTransposed : KeptW::kItself;
}

void warn_once_if_slower(const PlanArgs& args, Why why) {
  const bool slower = why == Why::kScalePer32 || why == Why::kRowsOnHopper ||
                      why == Why::kCapability || why == Why::kMultiples;
  if (!slower || !args.device.is_cuda()) return;
  static std::atomic<bool> warned = false;
  if (warned.exchange(true)) return;
  warn("moxie: this recipe (" + to_text(args.recipe) + ") takes longer than bf16 on this GPU: " +
       reason(args, why) + (why == Why::kScalePer32 ? "" : "; the recipe bf16 is faster") +
       ". With kernels=emulated in the recipe it does not warn");
}

}  // namespace

const char* name(Kernel kernel) {
  switch (kernel) {
    case Kernel::kMm: return "mm";
    case Kernel::kTorchGrouped: return "torch._grouped_mm";
    case Kernel::kProduct: return "product";
    case Kernel::kMasked: return "masked mm";
    case Kernel::kSm90: return "sm90";
    case Kernel::kSm90Rows: return "sm90_rows";
    case Kernel::kSm100: break;
  }
  return "sm100";
}

Plan decide(const PlanArgs& args) {
  Plan plan{.recipe = args.recipe};
  for (const Pass pass : {Pass::kForward, Pass::kDgrad, Pass::kWgrad}) {
    const auto [kernel, why] = choose(args, pass);
    plan.kernels[static_cast<size_t>(pass)] = kernel;
    plan.whys[static_cast<size_t>(pass)] = why;
  }
  plan.layout = layout_for(args.recipe, args.device, args.n, args.k);
  const bool swizzles = plan.kernel(Pass::kForward) == Kernel::kSm100;
  // Scales of an x that the caller quantized stay plain: decoding reads them as they are, and
  // Hopper's pass converts them to quads. Only Blackwell's kernel needs them swizzled.
  const auto as_it_came = swizzles ? ScaleLayout::kSwizzled : ScaleLayout::kPlain;
  plan.x_layout = args.quantized_x ? as_it_came : plan.layout;
  plan.w_layout = plan.layout;
  plan.kept_x = kept_x_of(args);
  plan.kept_w = kept_w_of(args);
  plan.quantized_x = args.quantized_x;
  // On a GPU, fused ops pay only for bf16: for f32, a fused kernel is no faster than two ops.
  plan.fuses = args.recipe.scaling == Scaling::kBlock && !args.recipe.scales_too_small &&
               (args.x == at::kBFloat16 || !args.device.is_cuda());
  return plan;
}

Plan make_plan(const PlanArgs& args) {
  ++plan_count;
  const Plan plan = decide(args);
  warn_once_if_slower(args, plan.why(Pass::kForward));
  return plan;
}

MlpPlan make_plan(const PlanArgs& up, const PlanArgs& down) {
  const Plan of_up = make_plan(up);
  return {of_up, decide(down)};
}

PassPlan pass_of(const Plan& plan, Pass pass) {
  return {.recipe = plan.recipe,
          .kernel = plan.kernel(pass),
          .tokens = pass == Pass::kForward ? plan.x_layout : plan.layout,
          .weights = plan.w_layout};
}

Kernel choose_kernel(const PlanArgs& args, Pass pass, OperandDtype operands) {
  return operands == OperandDtype::kFp8 ? choose(args, pass).kernel
                                        : high_precision_kernel(args, pass);
}

FormAndBlock form_of_a(const Recipe& recipe, Pass pass) {
  if (pass == Pass::kWgrad) return {Form::kColwise, recipe.wgrad_dy};
  return {Form::kRowwise, recipe.activations};
}

FormAndBlock form_of_b(const Recipe& recipe, Pass pass) {
  switch (pass) {
    case Pass::kForward: return {Form::kRowwise, recipe.weights};
    case Pass::kDgrad: return {Form::kColwise, recipe.weights_t()};
    case Pass::kWgrad: break;
  }
  return {Form::kColwise, recipe.wgrad_x};
}

ScaleLayout layout_for(const Recipe& recipe, c10::Device device, const c10::SymInt& n,
                       const c10::SymInt& k) {
  const PlanArgs args{.recipe = recipe, .device = device, .rows = 1, .groups = 1, .n = n, .k = k};
  return layout_of(args, choose_fp8(args, Pass::kForward).kernel);
}

ScaleLayout layout_by_shape(const Recipe& recipe, Kernel kernel, const WeightForm& w) {
  if (kernel == Kernel::kSm100) return ScaleLayout::kSwizzled;
  if (w.scale.dim() == 2 && !multiplies_fp8(kernel)) return ScaleLayout::kSwizzled;
  if (w.scale.dim() != 3) return ScaleLayout::kPlain;
  const auto [form, block] = form_of_b(recipe, w.pass);
  const int k_block = k_of(block, form);
  const auto has_columns = [&](const c10::SymInt& count) {
    return w.scale.sym_size(2).sym_eq(count).guard_or_false(__FILE__, __LINE__);
  };
  const bool quads = k_block == kQuadBlock && has_columns(kQuad) &&
                     !has_columns(ceil_div(w.data.sym_size(-1), c10::SymInt(k_block)));
  return quads ? ScaleLayout::kQuads : ScaleLayout::kPlain;
}

c10::Device device_behind(const at::Tensor& tensor) {
  const bool traced_on_gpu =
      tensor.is_meta() && tensor.key_set().has_backend(c10::BackendComponent::CUDABit);
  return traced_on_gpu ? c10::Device(c10::kCUDA) : tensor.device();
}

std::string reason(const PlanArgs& args, Why why) {
  const auto sizes = [&] {
    return ", got n = " + std::to_string(value(args.n)) +
           " and k = " + std::to_string(value(args.k));
  };
  const int capability = capability_of(args.device);
  switch (why) {
    case Why::kFastest: return "";
    case Why::kQuantizesNothing: return "the recipe quantizes nothing";
    case Why::kAskedFor: return "the recipe asks for it";
    case Why::kCpu: return "a CPU has no FP8 product";
    case Why::kScalePer32:
      return "Hopper's FP8 tensor cores can afford a scale per 128 of the contraction, not per 32; "
             "mxfp8_rceil_128 is the recipe for it";
    case Why::kBlocks:
      return "Hopper's FP8 kernel takes wgrad_dy=128x1 and wgrad_x=128x32, got " +
             name(args.recipe.wgrad_dy) + " and " + name(args.recipe.wgrad_x);
    case Why::kRowsOnHopper: return "torch's FP8 product with a scale per row is one for Hopper";
    case Why::kCapability:
      return "no FP8 kernel for compute capability " + std::to_string(capability / 10) + "." +
             std::to_string(capability % 10);
    case Why::kMultiples:
      return (capability == kHopper ? "Hopper's FP8 kernels take multiples of 16"
                                    : "block-scaled tensor cores take multiples of 32") +
             sizes();
    case Why::kSize:
      return "Hopper's FP8 kernel takes fewer than 2^31 - 1024 rows of x and of w in all, and "
             "fewer "
             "than 2^30 - 1024 columns" +
             sizes();
    case Why::kGroups:
      return "torch's product takes at most " + std::to_string(kMostTorchGroups) + " groups";
    case Why::kResult:
      return "torch's product gives bf16, and other results would be rounded twice";
    case Why::kHighPrecision: break;
  }
  return "the recipe keeps both operands of wgrad in bf16";
}

int64_t plans_made() { return plan_count.load(); }

void pretend_gpu(std::string_view kind, PretendOn on) {
  const int capability = kind.empty()      ? kNotPretended
                         : kind == "sm90"  ? kHopper
                         : kind == "sm100" ? 100
                         : kind == "other" ? kNoFp8Kernels
                                           : -1;
  MOXIE_CHECK(capability >= 0, "pretend_gpu: there are sm90, sm100 and other, got '", kind, "'");
  pretended_on = on;
  pretended = capability;
}

}  // namespace moxie::ops
