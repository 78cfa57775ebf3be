// Tests the plans of calls, also for GPUs that this machine does not have.
#include "moxie/torch/plan/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <sstream>

#include "moxie/torch/plan/explain.h"

namespace moxie::ops {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

constexpr Pass kPasses[] = {Pass::kForward, Pass::kDgrad, Pass::kWgrad};

// While one exists, plans are made as if this machine had a GPU of that kind.
class Pretended {
 public:
  explicit Pretended(std::string_view kind) { pretend_gpu(kind); }
  ~Pretended() { pretend_gpu(""); }
};

struct Told {
  Plan plan;
  std::array<std::string, 3> reasons;
};

struct Case {
  std::string_view recipe = "mxfp8_rceil_128";
  int64_t rows = 4096, groups = 8, n = 2048, k = 7168;
  at::ScalarType y = at::kBFloat16, dw = at::kBFloat16;
  bool main_grad = false;
};

Told plan_of(const Case& of) {
  const Recipe recipe = parse_recipe(of.recipe, "test");
  const PlanArgs args{.recipe = recipe,
                      .device = c10::kCPU,
                      .rows = of.rows,
                      .groups = of.groups,
                      .n = of.n,
                      .k = of.k,
                      .y = of.y,
                      .dw = of.dw,
                      .needs_dx = true,
                      .needs_dw = true,
                      .adds_to_main_grad = of.main_grad};
  Told told{make_plan(args), {}};
  for (size_t i = 0; i < 3; ++i) told.reasons[i] = reason(args, told.plan.whys[i]);
  return told;
}

TEST(Plan, HopperHasAKernelForBlocksOf128AndOneForRows) {
  const Pretended hopper("sm90");
  for (const Pass pass : kPasses) {
    EXPECT_EQ(plan_of({}).plan.kernel(pass), Kernel::kSm90);
    EXPECT_EQ(plan_of({"fp8_rowwise"}).plan.kernel(pass), Kernel::kSm90Rows);
  }
  const Told by_32 = plan_of({"mxfp8_rceil"});
  EXPECT_EQ(by_32.plan.kernel(Pass::kForward), Kernel::kMm);
  EXPECT_THAT(by_32.reasons[0], HasSubstr("mxfp8_rceil_128 is the recipe for it"));
}

TEST(Plan, BlackwellMultipliesBlocksAndDecodesRows) {
  const Pretended blackwell("sm100");
  for (const Pass pass : kPasses) {
    EXPECT_EQ(plan_of({}).plan.kernel(pass), Kernel::kSm100);
    EXPECT_EQ(plan_of({"mxfp8_rceil"}).plan.kernel(pass), Kernel::kSm100);
  }
  EXPECT_THAT(plan_of({"fp8_rowwise"}).reasons[0], HasSubstr("is one for Hopper"));
}

TEST(Plan, ARowHasWholeSixteens) {
  const Pretended hopper("sm90");
  for (const char* recipe : {"mxfp8_rceil_128", "fp8_rowwise"}) {
    EXPECT_THAT(plan_of({.recipe = recipe, .n = 16, .k = 16}).reasons[0], IsEmpty());
    EXPECT_THAT(plan_of({.recipe = recipe, .n = 24, .k = 64}).reasons[0],
                HasSubstr("take multiples of 16, got n = 24 and k = 64"));
    for (const int64_t k : {40, 0})
      EXPECT_EQ(plan_of({.recipe = recipe, .n = 64, .k = k}).plan.kernel(Pass::kDgrad),
                Kernel::kMm);
  }
  const Pretended blackwell("sm100");
  EXPECT_THAT(plan_of({.recipe = "mxfp8_rceil", .n = 64, .k = 48}).reasons[0],
              HasSubstr("take multiples of 32, got n = 64 and k = 48"));
}

TEST(Plan, OtherGpusDecode) {
  const Pretended other("other");
  for (const std::string& recipe : recipe_names())
    for (const Pass pass : kPasses)
      EXPECT_FALSE(multiplies_fp8(plan_of({recipe}).plan.kernel(pass))) << recipe;
}

TEST(Plan, ARecipeThatAsksForDecodingGetsIt) {
  for (const char* kind : {"sm90", "sm100"}) {
    const Pretended gpu(kind);
    EXPECT_EQ(plan_of({"fp8_rowwise:kernels=emulated"}).reasons[0], "the recipe asks for it");
    EXPECT_EQ(plan_of({"bf16"}).reasons[0], "the recipe quantizes nothing");
    EXPECT_EQ(plan_of({"mxfp8_rceil_wgrad_with_hp"}).reasons[2],
              "the recipe keeps both operands of wgrad in bf16");
  }
}

TEST(Plan, EveryPassHasAReasonUnlessItIsTheFastest) {
  for (const char* kind : {"", "other", "sm90", "sm100"}) {
    const Pretended gpu(kind);
    for (const std::string& recipe : recipe_names()) {
      const Told told = plan_of({recipe});
      for (const Pass pass : kPasses)
        EXPECT_EQ(told.reasons[static_cast<size_t>(pass)].empty(),
                  multiplies_fp8(told.plan.kernel(pass)))
            << recipe << " on " << kind;
    }
  }
}

TEST(Plan, ScalesPerRowGiveBf16ResultsAlone) {
  const Pretended hopper("sm90");
  const Told f32 = plan_of({.recipe = "fp8_rowwise", .dw = at::kFloat});
  EXPECT_EQ(f32.plan.kernel(Pass::kForward), Kernel::kSm90Rows);
  EXPECT_THAT(f32.reasons[2], HasSubstr("rounded twice"));
  EXPECT_THAT(plan_of({.recipe = "fp8_rowwise", .y = at::kFloat}).reasons[0],
              HasSubstr("rounded twice"));
  EXPECT_THAT(plan_of({.recipe = "fp8_rowwise", .main_grad = true}).reasons[2],
              HasSubstr("rounded twice"));
}

TEST(Plan, TorchsKernelsTakeFewerThan1024Groups) {
  const Pretended hopper("sm90");
  EXPECT_THAT(plan_of({.recipe = "fp8_rowwise", .groups = 1023}).reasons[0], IsEmpty());
  EXPECT_THAT(plan_of({.recipe = "fp8_rowwise", .groups = 1024}).reasons[0],
              HasSubstr("at most 1023 groups"));
  EXPECT_THAT(plan_of({.groups = 1024}).reasons[0], IsEmpty());
}

TEST(Plan, HoppersKernelReaches31Bits) {
  const Pretended hopper("sm90");
  constexpr int64_t kMost = (int64_t{1} << 31) - 1025;
  EXPECT_THAT(plan_of({.rows = kMost}).reasons[0], IsEmpty());
  EXPECT_THAT(plan_of({.rows = kMost + 1}).reasons[0], HasSubstr("fewer than 2^31 - 1024"));
  EXPECT_THAT(plan_of({.rows = kMost}).reasons[2], HasSubstr("fewer than 2^31 - 1024"))
      << "the rows of wgrad are padded";
  EXPECT_EQ(plan_of({.rows = kMost + 1}).plan.layout, ScaleLayout::kQuads)
      << "what is kept does not depend on the rows";
}

TEST(Plan, HoppersWgradHasBlocksOfItsOwn) {
  const Pretended hopper("sm90");
  for (const char* blocks : {"wgrad_dy=32x1,wgrad_x=32x1", "wgrad_dy=128x1,wgrad_x=128x1"}) {
    const std::string recipe = std::string("mxfp8_rceil_128:") + blocks;
    const Told told = plan_of({recipe});
    EXPECT_EQ(told.plan.kernel(Pass::kDgrad), Kernel::kSm90);
    EXPECT_THAT(told.reasons[2], HasSubstr("takes wgrad_dy=128x1 and wgrad_x=128x32"));
  }
}

ScaleLayout layout(std::string_view recipe) { return plan_of({recipe}).plan.layout; }

TEST(Layout, IsSwizzledForBlocksOf32OnAGpuThatDecodes) {
  for (const char* recipe : {"mxfp8_rceil", "mxfp8_floor", "mxfp8_emulated_even",
                             "mxfp8_rceil_32x32", "mxfp8_rceil_wgrad_with_hp"}) {
    EXPECT_EQ(layout(recipe), ScaleLayout::kPlain) << recipe << " on a CPU";
    const Pretended other("other");
    EXPECT_EQ(layout(recipe), ScaleLayout::kSwizzled) << recipe;
  }
  const Pretended other("other");
  for (const char* recipe : {"mxfp8_rceil_128", "mxfp8_rceil:activations=1x128", "fp8_rowwise",
                             "mxfp8_rceil:wgrad_dy=128x1,wgrad_x=128x1", "bf16"})
    EXPECT_EQ(layout(recipe), ScaleLayout::kPlain) << recipe;
}

TEST(Layout, AGemmHasItsOwn) {
  {
    const Pretended hopper("sm90");
    EXPECT_EQ(layout("mxfp8_rceil_128"), ScaleLayout::kQuads);
    EXPECT_EQ(layout("mxfp8_rceil_128:wgrad_dy=32x1,wgrad_x=32x1"), ScaleLayout::kPlain);
    EXPECT_EQ(layout("fp8_rowwise"), ScaleLayout::kPlain);
  }
  const Pretended blackwell("sm100");
  for (const char* recipe : {"mxfp8_rceil", "mxfp8_rceil_128"})
    EXPECT_EQ(layout(recipe), ScaleLayout::kSwizzled) << recipe;
}

// What a plan keeps of w; only the fields named here differ from call to call.
struct KeptCase {
  std::string_view recipe;
  bool needs_dx = true, cached_w = false, w_stays = true;
};

KeptW kept_w_of(const KeptCase& of) {
  const Recipe recipe = parse_recipe(of.recipe, "test");
  return decide({.recipe = recipe,
                 .device = c10::kCPU,
                 .rows = 64,
                 .groups = 2,
                 .n = 96,
                 .k = 64,
                 .needs_dx = of.needs_dx,
                 .cached_w = of.cached_w,
                 .w_stays = of.w_stays})
      .kept_w;
}

TEST(Plan, OfWItKeepsTheFormForDgradOrWItselfAndOnlyIfDxIsNeeded) {
  constexpr std::string_view kKeeps = "mxfp8_rceil_128", kDoesNot = "mxfp8_rceil_128:keep_w=false";
  for (const bool cached : {false, true}) {
    EXPECT_EQ(kept_w_of({.recipe = kKeeps, .cached_w = cached}), KeptW::kTransposed);
    EXPECT_EQ(kept_w_of({.recipe = kDoesNot, .needs_dx = false, .cached_w = cached}),
              KeptW::kNothing);
  }
  EXPECT_EQ(kept_w_of({.recipe = kDoesNot}), KeptW::kItself);
  EXPECT_EQ(kept_w_of({.recipe = kDoesNot, .cached_w = true}), KeptW::kTransposed);
}

TEST(Plan, OfAWThatWasMadeForTheCallItKeepsTheForm) {
  EXPECT_EQ(kept_w_of({.recipe = "mxfp8_rceil_128:keep_w=false", .w_stays = false}),
            KeptW::kTransposed);
}

TEST(Packed, EveryRecipeComesBackFromItsInteger) {
  std::vector<std::string> texts = recipe_names();
  for (const char* more :
       {"identity", "broken_scales", "bf16:out=float32", "fp8_rowwise:wgrad_with_hp=true",
        "mxfp8_rceil_128:keep_w=false",
        "mxfp8_rceil:rule=even,activations=1x128,weights=128x32,kernels=emulated,out=bfloat16"})
    texts.emplace_back(more);
  std::set<int64_t> integers;
  for (const std::string& text : texts) {
    const Recipe recipe = parse_recipe(text, "test");
    EXPECT_EQ(unpack<Recipe>(pack(recipe), "test"), recipe) << text;
    integers.insert(pack(recipe));
  }
  EXPECT_EQ(integers.size(), texts.size());
}

TEST(Packed, APlanIsRestoredAndAnInvalidIntegerIsRefused) {
  const Pretended hopper("sm90");
  const Plan plan = plan_of({}).plan, back = unpack<Plan>(pack(plan), "test");
  EXPECT_EQ(pack(back), pack(plan));
  EXPECT_EQ(back.kernels, plan.kernels);
  EXPECT_EQ(back.kept_x, KeptX::kColwise);
  EXPECT_THROW(unpack<Plan>(int64_t{1} << 62, "test"), c10::Error);
  EXPECT_THROW(unpack<Recipe>(pack(parse_recipe("bf16", "test")) | int64_t{7} << 4, "test"),
               c10::Error);
}

TEST(Explain, PrintsALineForEachPassAndTheBytes) {
  const Pretended hopper("sm90");
  std::ostringstream out;
  out << explain({.n = 2048, .k = 7168, .rows = 4096, .groups = 8});
  EXPECT_THAT(out.str(), HasSubstr("forward: sm90 (x e4m3 1x128 quads, w e4m3 128x128 quads)\n"));
  EXPECT_THAT(out.str(), HasSubstr("wgrad: sm90 (dy_t e4m3 128x1 quads, x_t e4m3 128x32 quads)\n"));
  EXPECT_THAT(out.str(), HasSubstr("bytes of x"));
}

}  // namespace
}  // namespace moxie::ops
