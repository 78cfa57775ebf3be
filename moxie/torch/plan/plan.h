// What a call will do, decided once, where it enters: for each pass the kernel and why no faster
// one, in which layout the scales of each operand are, and what is kept for backward. Nodes, ops,
// errors, explain() and `moxie info` read it; nothing below decides again.
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

// What multiplies. The first four take bf16, f32 or f64; FP8 operands are decoded for them.
enum class Kernel : uint8_t {
  kMm,            // torch's dense product, once per group
  kTorchGrouped,  // torch._grouped_mm
  kProduct,       // Moxie's plain CUDA kernel: any sizes, f32 results, sums into a main gradient
  kMasked,        // a GPU with dtypes that only the identity recipe has: a product per group
  kSm90,          // Moxie's FP8 kernel for Hopper; on a CPU its reference
  kSm90Rows,      // torch._scaled_grouped_mm with a scale per row: Hopper
  kSm100,         // torch._scaled_grouped_mm with block scales: Blackwell
};
template <>
inline constexpr uint64_t kNumValues<Kernel> = 7;
constexpr bool multiplies_fp8(Kernel kernel) { return kernel >= Kernel::kSm90; }
const char* name(Kernel kernel);

// Why a pass does not take a faster kernel; text_of() has the words.
enum class Why : uint8_t {
  kFastest,
  kQuantizesNothing,
  kAskedFor,
  kCpu,
  kScalePer32,     // Hopper's tensor cores cannot afford it
  kBlocks,         // wgrad's, which Hopper's kernel has no code for
  kRowsOnHopper,   // and on no other GPU
  kCapability,     // a GPU without FP8 kernels
  kMultiples,      // n or k
  kSize,           // more rows, columns or groups than 32-bit coordinates reach
  kGroups,         // more than torch's kernels take
  kResult,         // not bf16, and torch's product gives nothing else
  kHighPrecision,  // wgrad_with_hp
};

// What is kept of x for wgrad. It depends on neither the number of rows nor the groups.
enum class KeptX : uint8_t {
  kNothing,
  kColwise,        // as wgrad reads it
  kHighPrecision,  // x itself
  kQuantizedX,     // an x that came quantized: as it came, to be requantized
};

// What decides about one grouped linear, y = x w^T and its gradients.
struct PlanArgs {
  const Recipe& recipe;
  c10::Device device;
  c10::SymInt rows, groups, n, k;
  bool has_offs = true;
  at::ScalarType x = at::kBFloat16;
  at::ScalarType y = at::kBFloat16, dx = at::kBFloat16, dw = at::kBFloat16;  // results
  bool needs_dx = false, needs_dw = false;
  bool adds_to_main_grad = false;
  std::optional<Block> quantized_x = std::nullopt;  // the block of an x that came quantized
};

struct Plan {
  Recipe recipe;
  std::array<Kernel, 3> kernels = {};  // of each Pass
  std::array<Why, 3> whys = {};
  ScaleLayout layout = ScaleLayout::kPlain;    // in which the quantizers of this call write scales
  ScaleLayout x_layout = ScaleLayout::kPlain;  // of the rowwise form of x: it may come quantized
  ScaleLayout w_layout = ScaleLayout::kPlain;
  KeptX kept_x = KeptX::kNothing;
  bool keeps_w_t = false;
  std::optional<Block> quantized_x = std::nullopt;
  bool fuses = false;  // x is of a kind that quantizers fused with swiglu and permute take

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
    f(self.keeps_w_t, 1);
    f(self.quantized_x);
    f(self.fuses, 1);
  }
};

Plan decide(const PlanArgs& args);
// The same for a call that is made: it counts, and warns of a recipe that is slower than bf16 here.
Plan make_plan(const PlanArgs& args);
// The two products of an expert's MLP, as one plan.
struct MlpPlan {
  Plan up, down;  // w13 and w2
};
MlpPlan make_plan(const PlanArgs& up, const PlanArgs& down);

// One pass as an op takes it: part of a plan.
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

// The kernel of a pass that is called on its own; operands that are not both in FP8 are multiplied
// in high precision.
enum class OperandDtype : uint8_t { kFp8, kOther };
Kernel choose_kernel(const PlanArgs& args, Pass pass, OperandDtype operands);

// Which form an operand of a pass has, and in which block. a is x, dy or dy_t; b is w, w_t or x_t.
struct FormAndBlock {
  Form form;
  Block block;
};
FormAndBlock form_of_a(const Recipe& recipe, Pass pass);
FormAndBlock form_of_b(const Recipe& recipe, Pass pass);

// The layout in which the quantizers of a recipe write scales.
ScaleLayout layout_for(const Recipe& recipe, c10::Device device, const c10::SymInt& n,
                       const c10::SymInt& k);

// The layout of scales of w that came quantized, by their shape: swizzled ones are [G, bytes],
// plain ones [G, rows, cols], and quads have four columns. (Plain ones of four columns are quads,
// byte for byte.) A weight cache may come from another device, so it need not be layout_for().
// Blackwell's product takes swizzled ones alone.
struct WeightForm {
  const at::Tensor& data;  // w [G, N, K] or w_t [G, K, N]
  const at::Tensor& scale;
  Pass pass;  // that reads it
};
ScaleLayout layout_by_shape(const Recipe& recipe, Kernel kernel, const WeightForm& w);

// Where the ops of a tensor run. Inside a Meta kernel, under torch.compile, the tensors of a GPU
// say that they are on none, and which one it is cannot be known: then it is the current one.
c10::Device device_behind(const at::Tensor& tensor);

// Why a pass of a plan takes no faster kernel, in words; empty where there is none.
std::string reason(const PlanArgs& args, Why why);

// How many plans this process has made: tests count them.
int64_t plans_made();

// For tests: kernels and layouts are chosen as if every device, or every GPU, were of this kind:
// sm90, sm100, or other (a GPU without FP8 kernels: its layouts); an empty name ends that.
enum class PretendOn : uint8_t { kEveryDevice, kGpus };
void pretend_gpu(std::string_view kind, PretendOn on = PretendOn::kEveryDevice);

}  // namespace moxie::ops
