// The plan of a call, made once, where the call enters: the kernel of each pass and why it is not a
// faster one, the layout of each operand's scales, and what is kept for backward. Nodes, ops,
// errors, explain() and `moxie info` read the plan; none of them decides any of this itself.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <array>
#include <string>
#include <string_view>

#include "moxie/core/gemm/product.h"
#include "moxie/core/layout/swizzle.h"
#include "moxie/torch/recipe.h"

namespace moxie::ops {

// The kernel that multiplies in a pass. The first four take bf16, f32 or f64: FP8 operands are
// decoded for them.
enum class Kernel : uint8_t {
  kMm,            // torch's dense GEMM; on a CPU, one call per group
  kTorchGrouped,  // torch._grouped_mm
  kProduct,       // Moxie's simple CUDA kernel: any sizes, f32 results, adds to a main gradient
  kMasked,        // f64 on a GPU: a GEMM over all rows for each group, other groups' rows masked
  kSm90,          // Moxie's FP8 kernel for Hopper; where it is called on a CPU, its reference
  kSm90Rows,      // torch._scaled_grouped_mm with a scale per row: Hopper
  kSm100,         // torch._scaled_grouped_mm with block scales: Blackwell
};
template <>
inline constexpr uint64_t kNumValues<Kernel> = 7;
constexpr bool multiplies_fp8(Kernel kernel) { return kernel >= Kernel::kSm90; }
const char* name(Kernel kernel);

// Why a pass does not use a faster kernel; reason() puts it in words.
enum class Why : uint8_t {
  kFastest,
  kQuantizesNothing,
  kAskedFor,
  kCpu,
  kScalePer32,     // a scale per 32: too costly for Hopper's tensor cores
  kBlocks,         // wgrad's blocks are not those of the Hopper kernel
  kRowsOnHopper,   // one scale per row needs Hopper
  kCapability,     // a GPU without FP8 kernels
  kMultiples,      // n or k is not a multiple of 16
  kSize,           // more rows, columns or groups than the kernel's 32-bit coordinates reach
  kGroups,         // more groups than torch's kernels take
  kResult,         // the result is not bf16, the only dtype of torch's kernel
  kHighPrecision,  // the recipe's wgrad_with_hp
};

// The form in which x is kept for wgrad. It does not depend on the number of rows or groups.
enum class KeptX : uint8_t {
  kNothing,
  kColwise,        // colwise, as wgrad reads it
  kHighPrecision,  // x itself
  kQuantizedX,     // an x that the caller quantized: kept as it is, requantized in backward
};

// The form in which w is kept for dgrad.
enum class KeptW : uint8_t {
  kNothing,
  kTransposed,  // as dgrad reads it
  kItself,      // w, from which backward makes the form that dgrad reads
};
template <>
inline constexpr uint64_t kNumValues<KeptW> = 3;

// The inputs of a plan: everything that decides how one grouped linear, y = x w^T, is computed.
struct PlanArgs {
  const Recipe& recipe;
  c10::Device device;
  c10::SymInt rows, groups, n, k;
  bool has_offs = true;
  at::ScalarType x = at::kBFloat16;
  at::ScalarType y = at::kBFloat16, dx = at::kBFloat16, dw = at::kBFloat16;  // results
  bool needs_dx = false, needs_dw = false;
  bool adds_to_main_grad = false;
  bool cached_w = false;  // whether the caller quantized w
  bool w_stays = true;    // whether w is in memory until backward anyway, as a parameter is
  std::optional<Block> quantized_x = std::nullopt;  // the block of x, if the caller quantized it
};

struct Plan {
  Recipe recipe;
  std::array<Kernel, 3> kernels = {};  // one per Pass
  std::array<Why, 3> whys = {};
  ScaleLayout layout = ScaleLayout::kPlain;    // of the scales that this call's quantizers write
  ScaleLayout x_layout = ScaleLayout::kPlain;  // of x rowwise; differs if the caller quantized x
  ScaleLayout w_layout = ScaleLayout::kPlain;
  KeptX kept_x = KeptX::kNothing;
  KeptW kept_w = KeptW::kNothing;
  std::optional<Block> quantized_x = std::nullopt;
  bool fuses = false;  // whether to quantize in the ops that are fused with swiglu and permute

  Kernel kernel(Pass pass) const { return kernels[static_cast<size_t>(pass)]; }
  Why why(Pass pass) const { return whys[static_cast<size_t>(pass)]; }

  template <class Self, class F>
  static void fields(Self& self, F&& f) {
    Recipe::fields(self.recipe, f);
    for (auto& kernel : self.kernels) f(kernel, 3);
    f(self.layout, 2);
    f(self.x_layout, 2);
    f(self.w_layout, 2);
    f(self.kept_x, 2);
    f(self.kept_w, 2);
    f(self.quantized_x);
    f(self.fuses, 1);
  }
};

Plan decide(const PlanArgs& args);
// decide() for a call that will run: counts the plan (plans_made), and warns if the recipe is
// slower than bf16 on this device.
Plan make_plan(const PlanArgs& args);
// The plans of the two grouped linears of an expert's MLP.
struct MlpPlan {
  Plan up, down;  // w13 and w2
};
MlpPlan make_plan(const PlanArgs& up, const PlanArgs& down);

// The part of a plan that concerns one pass, as that pass's op takes it.
struct PassPlan {
  Recipe recipe;
  Kernel kernel = Kernel::kMm;
  ScaleLayout tokens = ScaleLayout::kPlain;  // the layout of the scales of x, dy, x_t and dy_t
  ScaleLayout weights = ScaleLayout::kPlain;

  template <class Self, class F>
  static void fields(Self& self, F&& f) {
    Recipe::fields(self.recipe, f);
    f(self.kernel, 3);
    f(self.tokens, 2);
    f(self.weights, 2);
  }
};
PassPlan pass_of(const Plan& plan, Pass pass);

// The kernel of a pass that is called on its own, without a plan. Unless both operands are FP8, it
// is one that multiplies in high precision.
enum class OperandDtype : uint8_t { kFp8, kOther };
Kernel choose_kernel(const PlanArgs& args, Pass pass, OperandDtype operands);

// The form and block of an operand of a pass. a is x, dy or dy_t; b is w, w_t or x_t.
struct FormAndBlock {
  Form form;
  Block block;
};
FormAndBlock form_of_a(const Recipe& recipe, Pass pass);
FormAndBlock form_of_b(const Recipe& recipe, Pass pass);

// The layout in which quantizers write scales for this recipe, device and size of w.
ScaleLayout layout_for(const Recipe& recipe, c10::Device device, const c10::SymInt& n,
                       const c10::SymInt& k);

// The layout of the scales of a cached w, told by their shape: [G, bytes] is swizzled;
// [G, rows, cols] is plain, or quads if cols is 4 (plain scales of four columns equal quads byte
// for byte). A cache may have been made on another device, so its layout may differ from
// layout_for(). Blackwell's kernel takes only swizzled scales.
struct WeightForm {
  const at::Tensor& data;  // w [G, N, K] or w_t [G, K, N]
  const at::Tensor& scale;
  Pass pass;  // the pass that reads it
};
ScaleLayout layout_by_shape(const Recipe& recipe, Kernel kernel, const WeightForm& w);

// The device on which a tensor's ops will run. In a Meta kernel (torch.compile), tensors of any GPU
// have the device Meta; then the current GPU is assumed.
c10::Device device_behind(const at::Tensor& tensor);

// Why a pass does not use an FP8 kernel, in words; empty if it does.
std::string reason(const PlanArgs& args, Why why);

// How many plans this process has made, for tests.
int64_t plans_made();

// For tests: from now on, plans are made as if every device, or every GPU, were of this kind: sm90,
// sm100 or other (a GPU without FP8 kernels). An empty kind turns this off.
enum class PretendOn : uint8_t { kEveryDevice, kGpus };
void pretend_gpu(std::string_view kind, PretendOn on = PretendOn::kEveryDevice);

}  // namespace moxie::ops
