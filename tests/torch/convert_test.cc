// MxTensor, MxLinear and conversion by name, from C++.
#include "moxie/torch/convert.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "moxie/torch/config.h"
#include "moxie/torch/mx_tensor.h"
#include "moxie/torch/nn/linear.h"
#include "moxie/torch/nn/moe.h"
#include "moxie/torch/ops.h"

namespace moxie {
namespace {

using testing::HasSubstr;

template <class Body>
std::string message_of(Body&& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no exception";
}

struct ModelImpl : torch::nn::Module {
  ModelImpl() {
    up = register_module("up",
                         nn::MxLinear(nn::MxLinearOptions{.in_features = 32, .out_features = 64}));
    down = register_module("down", nn::MxLinear(nn::MxLinearOptions{
                                       .in_features = 64, .out_features = 32, .bias = false}));
    moe = register_module(
        "moe", nn::Moe(nn::MoeOptions{.router = {.dim = 32, .num_experts = 4, .top_k = 2},
                                      .hidden_dim = 48}));
    head = register_module("head", torch::nn::Linear(32, 10));
  }
  at::Tensor forward(const at::Tensor& x) { return head(moe(down(up(x).relu()))); }

  nn::MxLinear up = nullptr, down = nullptr;
  nn::Moe moe = nullptr;
  torch::nn::Linear head = nullptr;
};
TORCH_MODULE(Model);

TEST(MxLinear, IsALinearInTheBf16RecipeAndCloseToItInMxfp8) {
  nn::MxLinear linear(nn::MxLinearOptions{.in_features = 64, .out_features = 96});
  const at::Tensor x = at::randn({2, 5, 64});
  const at::Tensor exact = at::linear(x, linear->weight, linear->bias);
  const auto error = [&] { return ((linear(x) - exact).norm() / exact.norm()).item<double>(); };
  EXPECT_LT(error(), 0x1p-4);
  linear->set_recipe("identity");
  EXPECT_LT(error(), 0x1p-20);
  EXPECT_EQ(linear(x).sizes(), at::IntArrayRef({2, 5, 96}));
  EXPECT_THAT(message_of([&] { linear->set_recipe("fp4"); }),
              HasSubstr("there is no recipe 'fp4'"));
  EXPECT_THAT(message_of([&] { linear(at::randn({3, 63})); }), HasSubstr("x must be [.., 64]"));
}

TEST(Quantize, GivesRecipesByNameAndByPatternAndSaysWhatItDid) {
  Model model;
  const auto report = quantize(*model, {{"re:up|down", "mxfp8_rceil"},
                                        {"down", "fp8_rowwise"},
                                        {"re:moe\\..*", "mxfp8_rceil_32x32"},
                                        {"head", std::nullopt}});
  ASSERT_EQ(report.size(), 3u);
  EXPECT_EQ(model->up->recipe(), "mxfp8_rceil");
  EXPECT_EQ(model->down->recipe(), "fp8_rowwise") << "an exact name wins over a pattern";
  EXPECT_EQ(model->moe->experts->recipe(), "mxfp8_rceil_32x32");
  model(at::randn({20, 32})).square().sum().backward();
  for (const auto& parameter : model->named_parameters())
    EXPECT_TRUE(parameter.value().grad().defined()) << parameter.key();
}

TEST(Quantize, RefusesWhatMatchesNothingAStockLinearAndABadRecipeAndChangesNothing) {
  Model model;
  const auto convert = [&](const NameToRecipe& recipes) {
    return message_of([&] { quantize(*model, recipes); });
  };
  EXPECT_THAT(convert({{"up", "bf16"}, {"re:expert", "bf16"}}), HasSubstr("is called 're:expert'"));
  EXPECT_THAT(convert({{"up", "bf16"}, {"head", "bf16"}}),
              HasSubstr("'head' is a torch::nn::Linear, which its owner holds as that type"));
  EXPECT_THAT(convert({{"up", "mxfp9"}}), HasSubstr("there is no recipe 'mxfp9'"));
  EXPECT_THAT(convert({{"re:(", "bf16"}}), HasSubstr("is no regular expression"));
  EXPECT_EQ(model->up->recipe(), "mxfp8_rceil_128");
}

TEST(Config, StandsForARecipeAndRefusesWhatDoesNotGoTogether) {
  const auto config = MXFP8GroupedMMConfig::from_recipe("mxfp8_rceil_128");
  EXPECT_EQ(ops::parse_recipe(config.recipe(), "test"),
            ops::parse_recipe("mxfp8_rceil_128", "test"));
  EXPECT_EQ(config, MXFP8GroupedMMConfig::from_recipe(config.recipe()));
  EXPECT_EQ(MXLinearConfig::from_recipe_name("mxfp8_cublas_rceil").recipe(),
            MXFP8GroupedMMConfig{}.recipe());
  EXPECT_TRUE(FP8GroupedMMConfig::from_recipe("fp8_rowwise:wgrad_with_hp=true").wgrad_with_hp);
  EXPECT_THAT(message_of([] { MXFP8GroupedMMConfig::from_recipe("fp8_rowwise"); }),
              HasSubstr("fp8_rowwise is not MXFP8"));
  EXPECT_THAT(message_of([] {
                MXFP8GroupedMMConfig{.activations = {32, 32}}.recipe();
              }),
              HasSubstr("MXFP8GroupedMMConfig: recipe field activations must be one row tall"));
}

TEST(MxTensor, GoesThereAndBackAndIsCheckedWhenItComesFromElsewhere) {
  const at::Tensor x = at::randn({40, 96}).to(at::kBFloat16);
  const MxTensor mx = MxTensor::to_mx(x);
  const MxTensor same = MxTensor::from_qdata_and_scales(mx.qdata, mx.scale, at::kBFloat16);
  EXPECT_TRUE(at::equal(same.dequantize(), mx.dequantize()));
  EXPECT_EQ(mx.dequantize().scalar_type(), at::kBFloat16);
  EXPECT_THAT(message_of([&] { MxTensor::from_qdata_and_scales(mx.qdata, mx.scale, at::kHalf); }),
              HasSubstr("MxTensor: dtype must be torch.bfloat16 or torch.float32"));
  EXPECT_THAT(
      message_of([&] { MxTensor::from_qdata_and_scales(mx.qdata, mx.scale, at::kFloat, "1x128"); }),
      HasSubstr("MxTensor: scale must be [40, 1], got [40, 3]"));
}

}  // namespace
}  // namespace moxie
