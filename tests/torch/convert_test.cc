// Tests MxTensor, MxLinear and the conversion of modules by name from C++.
#include "moxie/torch/convert.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <set>
#include <unordered_set>

#include "moxie/torch/mx_tensor.h"
#include "moxie/torch/nn/linear.h"
#include "moxie/torch/nn/moe.h"
#include "moxie/torch/ops.h"
#include "moxie/torch/recipe.h"
#include "moxie/torch/weight_cache.h"

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

TEST(MxLinear, HasTheParametersAndTheGradientsOfALinearForAnyLeadingDims) {
  for (const bool bias : {false, true}) {
    nn::MxLinear linear(nn::MxLinearOptions{
        .in_features = 64, .out_features = 96, .bias = bias, .recipe = "identity"});
    torch::nn::Linear stock(torch::nn::LinearOptions(64, 96).bias(bias));
    const auto stock_parameters = stock->named_parameters();
    {
      const torch::NoGradGuard no_grad;
      for (const auto& parameter : linear->named_parameters())
        stock_parameters[parameter.key()].copy_(parameter.value());
    }
    for (const auto& sizes : {std::vector<int64_t>{64}, {3, 64}, {2, 0, 64}, {2, 3, 4, 64}}) {
      const at::Tensor x = at::randn(sizes).requires_grad_(), other = x.detach().requires_grad_();
      linear->zero_grad();
      stock->zero_grad();
      const at::Tensor y = linear(x), expected = stock(other);
      EXPECT_EQ(y.sizes(), expected.sizes());
      y.square().sum().backward();
      expected.square().sum().backward();
      EXPECT_TRUE(at::allclose(x.grad(), other.grad(), 1e-4, 1e-5));
      for (const auto& parameter : linear->named_parameters())
        EXPECT_TRUE(at::allclose(parameter.value().grad(), stock_parameters[parameter.key()].grad(),
                                 1e-4, 1e-4))
            << parameter.key();
    }
  }
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

TEST(Quantize, GivesWeightCachesAndRefreshesThem) {
  Model model;
  const at::Tensor x = at::randn({20, 32});
  constexpr bool kCached = true;
  quantize(*model, {{"up", ModuleRecipe{"mxfp8_rceil", kCached}},
                    {"re:moe.*", ModuleRecipe{"mxfp8_rceil", kCached}},
                    {"down", ModuleRecipe{"fp8_rowwise", kCached}}});
  EXPECT_TRUE(model->up->options().weight_cache && model->moe->experts->options().weight_cache);
  const auto fresh = [&] {
    Model other;
    quantize(*other, {{"re:up|moe.*", "mxfp8_rceil"}, {"down", "fp8_rowwise"}});
    const torch::NoGradGuard no_grad;
    const auto parameters = model->named_parameters();
    for (auto& parameter : other->named_parameters())
      parameter.value().copy_(parameters[parameter.key()]);
    return other(x);
  };
  EXPECT_TRUE(at::equal(model(x), fresh()));
  model(x).sum().backward();
  {
    const torch::NoGradGuard no_grad;
    for (const at::Tensor& parameter : model->parameters()) parameter.mul_(2);
  }
  EXPECT_FALSE(at::equal(model(x), fresh())) << "caches are not refreshed by themselves";
  refresh(*model);
  EXPECT_TRUE(at::equal(model(x), fresh()));
  model->to(at::kBFloat16);
  refresh(*model);
  EXPECT_EQ(model->up(x.to(at::kBFloat16)).scalar_type(), at::kBFloat16);
  quantize(*model, {{"up", "mxfp8_floor"}});
  EXPECT_TRUE(model->up->options().weight_cache) << "text leaves the cache as it is";
  quantize(*model, {{"up", ModuleRecipe{"mxfp8_floor", !kCached}}});
  EXPECT_FALSE(model->up->options().weight_cache);
}

TEST(Quantize, RefusesWhatMatchesNothingAStockLinearAndABadRecipeAndChangesNothing) {
  Model model;
  const auto convert = [&](const NameToRecipe& recipes) {
    return message_of([&] { quantize(*model, recipes); });
  };
  EXPECT_THAT(convert({{"up", "bf16"}, {"re:expert", "bf16"}}),
              HasSubstr("is called 're:expert'; the model has up, down, moe.experts"));
  EXPECT_THAT(convert({{"up", "bf16"}, {"head", "bf16"}}),
              HasSubstr("'head' is a torch::nn::Linear, which its owner holds as that type"));
  EXPECT_THAT(convert({{"up", "mxfp9"}}), HasSubstr("there is no recipe 'mxfp9'"));
  EXPECT_THAT(convert({{"re:(", "bf16"}}), HasSubstr("is no regular expression"));
  // Regular expressions that would exhaust the stack or memory, or match for too long.
  const std::string open(500, '('), close(500, ')');
  EXPECT_THAT(convert({{"re:" + open + close, "bf16"}}), HasSubstr("nested more than 32 deep"));
  EXPECT_THAT(convert({{"re:" + std::string(60000, '('), "bf16"}}),
              HasSubstr("longer than 1000 characters"));
  EXPECT_THAT(convert({{"re:((a{255}){255}){255}", "bf16"}}), HasSubstr("it has braces"));
  EXPECT_THAT(convert({{"re:(.*)\\1", "bf16"}}), HasSubstr("it has a back-reference"));
  EXPECT_EQ(model->up->recipe(), "mxfp8_rceil_128");
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

// Inputs of a grouped_mm with ragged groups and rows past the last one; backward() gives its
// gradients.
struct Product {
  explicit Product(at::ScalarType dtype) {
    torch::manual_seed(0);
    x = at::randn({235, 160}).to(dtype).requires_grad_();
    w = at::randn({5, 72, 160}).to(dtype).requires_grad_();
    bias = at::randn({5, 72}).to(dtype).requires_grad_();
    dy = at::randn({235, 72}).to(dtype);
  }

  ops::GroupedMmOptions options(std::string_view recipe) const {
    return {.offs = offs, .recipe = recipe, .bias = bias};
  }

  struct Results {
    at::Tensor y, dx, dw, dbias;
  };
  Results backward(const at::Tensor& y) const {
    for (const at::Tensor& input : {x, w, bias}) input.mutable_grad().reset();
    y.backward(dy.to(y.scalar_type()));
    return {y.detach(), x.grad(), w.grad(), bias.grad()};
  }

  at::Tensor offs = at::tensor({37, 37, 101, 106, 226}, at::kInt);
  at::Tensor x, w, bias, dy;
};

std::vector<std::string> block_recipes() {
  std::vector<std::string> names;
  for (const std::string& name : ops::recipe_names())
    if (ops::parse_recipe(name, "test").scaling == ops::Scaling::kBlock) names.push_back(name);
  return names;
}

class MxTensorProduct : public testing::TestWithParam<std::tuple<std::string, at::ScalarType>> {};

TEST_P(MxTensorProduct, EqualsQuantizingTheSameValuesInTheCall) {
  const auto& [recipe, dtype] = GetParam();
  const ops::Recipe fields = ops::parse_recipe(recipe, "test");
  const Product product(dtype);
  const auto options = product.options(recipe);
  const MxTensor mx = MxTensor::to_mx(product.x, name(fields.activations), name(fields.rule));
  const auto expected = product.backward(ops::grouped_mm(product.x, product.w, options));
  const auto actual = product.backward(ops::grouped_mm(mx, product.w, options));
  EXPECT_TRUE(at::equal(actual.y, expected.y));
  EXPECT_TRUE(at::equal(actual.dx, expected.dx));
  EXPECT_TRUE(at::equal(actual.dbias, expected.dbias));
  EXPECT_EQ(actual.dx.scalar_type(), dtype);
  // wgrad quantizes the decoded elements of mx again, so dw must be that of a call with decoded mx
  // as x. `expected` quantized the original x for wgrad, so its dw is only close.
  const at::Tensor decoded =
      ops::dequantize_rowwise(mx.qdata, mx.scale, {.block = mx.block, .dtype = at::kFloat});
  const auto of_decoded = product.backward(ops::grouped_mm(decoded, product.w, options));
  EXPECT_TRUE(at::equal(actual.dw, of_decoded.dw));
  const double error = ((actual.dw - expected.dw).norm() / expected.dw.norm()).item<double>();
  EXPECT_LT(error, fields.wgrad == ops::Wgrad::kQuantized ? 0x1p-5 : 0x1p-4);
}

INSTANTIATE_TEST_SUITE_P(, MxTensorProduct,
                         testing::Combine(testing::ValuesIn(block_recipes()),
                                          testing::Values(at::kBFloat16, at::kFloat)),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" +
                                  c10::toString(std::get<1>(info.param));
                         });

TEST(MxTensor, GetsItsGradientWhereItCameFromElsewhere) {
  const Product product(at::kBFloat16);
  const auto [qdata, scale] = ops::quantize_rowwise(product.x.detach());
  const MxTensor mx = MxTensor::from_qdata_and_scales(qdata, scale, at::kBFloat16);
  EXPECT_EQ(mx.proxy.storage().nbytes(), 2u) << "no bf16 copy beside the FP8";
  mx.proxy.requires_grad_();
  const auto options = product.options("mxfp8_rceil");
  const auto expected = product.backward(ops::grouped_mm(product.x, product.w, options));
  product.backward(ops::grouped_mm(mx, product.w, options));
  EXPECT_TRUE(at::equal(mx.proxy.grad(), expected.dx));
  EXPECT_FALSE(qdata.requires_grad());

  const MxTensor of_x = MxTensor::to_mx(product.x);
  product.x.mutable_grad().reset();
  of_x.dequantize().backward(product.dy.new_ones({235, 160}));
  EXPECT_TRUE(at::equal(product.x.grad(), at::ones_like(product.x)));
}

TEST(MxTensor, MultipliesWithACacheIntoAMainGradientAndWithoutAutograd) {
  const Product product(at::kBFloat16);
  const MxTensor mx = MxTensor::to_mx(product.x.detach(), "1x128");
  auto options = product.options("mxfp8_rceil_128");
  const auto expected = product.backward(ops::grouped_mm(mx, product.w, options));
  EXPECT_FALSE(expected.dx.defined());
  const WeightCache cache(product.w);
  options.quantized_w = cache.tensors();
  options.main_grad = at::zeros({5, 72, 160});
  const auto actual = product.backward(ops::grouped_mm(mx, product.w, options));
  EXPECT_TRUE(at::equal(actual.y, expected.y));
  EXPECT_FALSE(actual.dw.defined());
  EXPECT_TRUE(at::equal(options.main_grad->to(at::kBFloat16), expected.dw));
  const c10::InferenceMode inference;
  EXPECT_TRUE(at::equal(ops::grouped_mm(mx, product.w, options), expected.y));
}

TEST(MxTensor, IsRefusedInABlockThatTheRecipeDoesNotHave) {
  const Product product(at::kBFloat16);
  const auto multiply = [&](const MxTensor& mx, std::string_view recipe) {
    return message_of([&] { ops::grouped_mm(mx, product.w, product.options(recipe)); });
  };
  const MxTensor mx = MxTensor::to_mx(product.x);
  EXPECT_THAT(multiply(mx, "mxfp8_rceil_128"),
              HasSubstr("grouped_mm: x is an MXTensor in blocks of 1x32, and the recipe takes "
                        "activations in blocks of 1x128"));
  EXPECT_THAT(multiply(mx, "bf16"), HasSubstr("and this recipe has none"));
  EXPECT_EQ(multiply(MxTensor::to_mx(product.x, "1x128"), "mxfp8_rceil"), "no exception");
  EXPECT_THAT(multiply({mx.qdata, mx.scale.slice(1, 0, 2), "1x32", mx.proxy}, "mxfp8_rceil"),
              HasSubstr("grouped_mm: scale must be [235, 5], got [235, 2]"));
  EXPECT_THAT(multiply({mx.qdata, mx.scale, "1x32", product.dy}, "mxfp8_rceil"),
              HasSubstr("grouped_mm: x must be [235, 160], got [235, 72]"));
}

}  // namespace
}  // namespace moxie
