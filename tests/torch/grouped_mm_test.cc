// Tests the differentiable grouped_mm from C++, in a program without Python.
#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "moxie/torch/ops.h"
#include "moxie/torch/recipe.h"
#include "moxie/torch/weight_cache.h"

namespace moxie {
namespace {

using testing::HasSubstr;

at::Tensor offs() { return at::tensor({3, 3, 40, 60}, at::kInt); }
at::Tensor x() { return at::randn({70, 96}).set_requires_grad(true); }
at::Tensor w() { return at::randn({4, 64, 96}).set_requires_grad(true); }

double snr(const at::Tensor& expected, const at::Tensor& actual) {
  return 20 *
         std::log10(expected.norm().item<double>() / (actual - expected).norm().item<double>());
}

TEST(GroupedMm, HasGradientsForXWAndBiasFromCpp) {
  const at::Tensor a = x(), b = w(), bias = at::randn({4, 64}).set_requires_grad(true);
  const at::Tensor exact =
      ops::grouped_mm(a, b, {.offs = offs(), .recipe = "identity", .bias = bias});
  exact.sum().backward();
  const at::Tensor da = a.grad().clone(), db = b.grad().clone(), dbias = bias.grad().clone();
  for (const at::Tensor& tensor : {a, b, bias}) tensor.mutable_grad() = at::Tensor();
  const at::Tensor y = ops::grouped_mm(a, b, {.offs = offs(), .bias = bias});
  y.sum().backward();
  EXPECT_GE(snr(exact, y), 25);
  EXPECT_GE(snr(da, a.grad()), 25);
  EXPECT_GE(snr(db, b.grad()), 25);
  EXPECT_TRUE(at::equal(dbias, bias.grad()));
  EXPECT_EQ(b.grad()[1].abs().max().item<float>(), 0) << "a group without rows";
  EXPECT_EQ(y.slice(0, 60).abs().max().item<float>(), 0) << "rows of no group";
}

TEST(GroupedMm, AddsToAMainGradient) {
  const at::Tensor a = x(), b = w(), main_grad = at::zeros({4, 64, 96});
  ops::grouped_mm(a, b, {.offs = offs()}).sum().backward();
  for (int i = 0; i < 2; ++i)
    ops::grouped_mm(a, b.detach().set_requires_grad(true), {.offs = offs(), .main_grad = main_grad})
        .sum()
        .backward();
  EXPECT_TRUE(at::equal(main_grad, 2 * b.grad()));
}

TEST(WeightCache, GivesTheResultOfQuantizingEachTimeOnceItIsRefreshed) {
  const at::Tensor a = x(), b = w();
  std::vector<WeightCache> caches = {WeightCache(b)};
  const auto run = [&] {
    return ops::grouped_mm(a, b, {.offs = offs(), .quantized_w = caches[0].tensors()});
  };
  const at::Tensor before = run();
  EXPECT_TRUE(at::equal(before, ops::grouped_mm(a, b, {.offs = offs()})));
  struct Descent {
    at::Tensor w;
    void step() { w.detach().mul_(0.5); }
  } optimizer{b};
  step(optimizer, caches);
  EXPECT_FALSE(at::equal(before, run()));
  EXPECT_TRUE(at::equal(run(), ops::grouped_mm(a, b, {.offs = offs()})));
  EXPECT_LT(caches[0].num_bytes(), static_cast<int64_t>(b.nbytes()) * 6 / 10);  // of f32
}

TEST(ExpertMlp, IsItsThreeStepsBitForBit) {
  const at::Tensor a = x(), w13 = at::randn({4, 64, 96}).set_requires_grad(true);
  const at::Tensor w2 = at::randn({4, 96, 32}).set_requires_grad(true);
  const at::Tensor y = ops::expert_mlp(a, w13, w2, {.offs = offs()});
  y.sum().backward();
  const at::Tensor da = a.grad().clone(), dw13 = w13.grad().clone(), dw2 = w2.grad().clone();
  for (const at::Tensor& tensor : {a, w13, w2}) tensor.mutable_grad() = at::Tensor();
  const at::Tensor h = ops::grouped_mm(a, w13, {.offs = offs()});
  const at::Tensor chain = ops::grouped_mm(ops::swiglu(h), w2, {.offs = offs()});
  chain.sum().backward();
  EXPECT_TRUE(at::equal(y, chain));
  EXPECT_TRUE(at::equal(da, a.grad()) && at::equal(dw13, w13.grad()) && at::equal(dw2, w2.grad()));
}

TEST(Recipe, OfEveryPresetSurvivesTheWayThroughText) {
  for (const std::string& name : ops::recipe_names()) {
    const ops::Recipe recipe = ops::parse_recipe(name, "test");
    EXPECT_EQ(ops::parse_recipe(ops::to_text(recipe), "test"), recipe) << name;
  }
}

TEST(Recipe, OfAnUnknownNameIsRefusedWithTheNamesThereAre) {
  try {
    ops::grouped_mm(x(), w(), {.offs = offs(), .recipe = "mxfp4"});
    FAIL() << "no exception";
  } catch (const std::exception& error) {
    EXPECT_THAT(error.what(), HasSubstr("grouped_mm: there is no recipe 'mxfp4'; there are bf16"));
  }
}

}  // namespace
}  // namespace moxie
