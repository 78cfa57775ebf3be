// Tests the statistics of quantization errors, and how the C++ modules collect them.
#include "moxie/torch/stats.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "moxie/torch/nn/linear.h"
#include "moxie/torch/nn/moe.h"
#include "moxie/torch/ops.h"

namespace moxie {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

at::Tensor offs() { return at::tensor({10, 10, 50}, at::kInt); }

std::vector<double> values(const at::Tensor& stats) {
  const at::Tensor flat = stats.contiguous();
  return {flat.const_data_ptr<double>(), flat.const_data_ptr<double>() + flat.numel()};
}

double energy(const at::Tensor& x) { return x.to(at::kDouble).square().sum().item<double>(); }

TEST(QuantizationStats, AreOfTheFormThatAPassContracts) {
  const at::Tensor x = at::randn({64, 96});
  const at::Tensor covered = x.slice(0, 0, 50);  // rows that belong to a group
  const auto [qdata_t, scale_t] = ops::quantize_colwise(x, {.offs = offs(), .block = "128x32"});
  const at::Tensor decoded = ops::dequantize_colwise(
      qdata_t, scale_t, 64, {.offs = offs(), .block = "128x32", .dtype = at::kFloat});
  const auto stats = values(ops::quantization_stats(x, {.offs = offs(), .part = "x_t"}));
  EXPECT_NEAR(stats[0], energy(covered), 1e-9 * stats[0]);
  EXPECT_NEAR(stats[1], energy(covered - decoded.slice(0, 0, 50)), 1e-9 * stats[1]);
  EXPECT_EQ(stats[4], 50 * 96);
}

TEST(QuantizationStats, CountFlushedAndClippedElements) {
  const at::Tensor x = at::ones({1, 32});
  x[0][0] = 500.f;     // clips under FLOOR: the scale is 1, and e4m3 ends at 448
  x[0][1] = 0x1p-11f;  // flushed to 0: below half of the smallest e4m3 value
  EXPECT_THAT(values(ops::quantization_stats(x, {.recipe = "mxfp8_floor"})),
              ElementsAre(testing::_, testing::_, 1, 1, 32));
  EXPECT_THAT(values(ops::quantization_stats(x, {.recipe = "mxfp8_rceil"})),
              ElementsAre(testing::_, testing::_, 1, 0, 32));
  EXPECT_EQ(sqnr(ops::quantization_stats(x, {.recipe = "identity"})).item<double>(), INFINITY);
}

TEST(QuantizationStats, RefuseAnUnknownOperand) {
  const auto message_of = [](const at::Tensor& x, const ops::QuantizationStatsOptions& options) {
    try {
      ops::quantization_stats(x, options);
    } catch (const std::exception& error) {
      return std::string(error.what());
    }
    return std::string("no exception");
  };
  EXPECT_THAT(message_of(at::randn({4, 32}), {.part = "z"}),
              HasSubstr("quantization_stats: part must be x, w, x_t, w_t, dy or dy_t, got 'z'"));
  EXPECT_THAT(message_of(at::randn({4, 32}), {.part = "w"}),
              HasSubstr("quantization_stats: x must be [groups, n, k] for this part, got 2 dims"));
}

TEST(AddOnce, AddsNothingInsideOfABackwardPass) {
  const at::Tensor total = at::zeros({1}), one = at::ones({1});
  const at::Tensor x = at::ones({1}).requires_grad_();
  const at::Tensor y = x * 2;
  y.register_hook([=](const at::Tensor&) { ops::add_once_(total, one); });
  ops::add_once_(total, one);
  y.backward();
  EXPECT_EQ(total.item<float>(), 1);
}

nn::MoeOptions small(const std::string& recipe) {
  return {.router = {.dim = 32,
                     .num_experts = 5,
                     .top_k = 2,
                     .tensor = at::TensorOptions().dtype(at::kBFloat16)},
          .hidden_dim = 48,
          .shared_hidden_dim = 16,
          .recipe = recipe};
}

// The result and every gradient.
std::vector<at::Tensor> step(nn::Moe& layer, const at::Tensor& x) {
  layer->zero_grad();
  const at::Tensor y = layer(x);
  y.square().sum().backward();
  std::vector<at::Tensor> results = {y};
  for (const at::Tensor& parameter : layer->parameters())
    results.push_back(parameter.grad().clone());
  return results;
}

TEST(CollectStats, AddsUpEveryOperandOfForwardAndBackwardAndChangesNoResult) {
  const at::Tensor x = at::randn({20, 32}).to(at::kBFloat16);
  for (const char* recipe :
       {"mxfp8_rceil_128", "mxfp8_floor", "fp8_rowwise", "bf16", "mxfp8_rceil_wgrad_with_hp"}) {
    nn::Moe layer(small(recipe));
    const auto expected = step(layer, x);
    EXPECT_EQ(energy(layer->experts->stats()), 0) << "off unless asked for";
    for (nn::Quantizable* module : {static_cast<nn::Quantizable*>(layer->experts.get()),
                                    static_cast<nn::Quantizable*>(layer->shared->experts.get())}) {
      module->collect_stats(true);
      EXPECT_THAT(module->products(), ElementsAre("w13", "w2"));
    }
    const auto actual = step(layer, x);
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(at::equal(actual[i], expected[i])) << recipe << ", result " << i;

    const at::Tensor stats = layer->experts->stats().clone();
    // Counts of elements of x, w, x_t, w_t, dy, dy_t (PARTS), first for w13, then for w2.
    EXPECT_THAT(values(stats.select(0, 0).select(-1, 4)),
                ElementsAre(40 * 32, 5 * 96 * 32, 40 * 32, 5 * 96 * 32, 40 * 96, 40 * 96));
    EXPECT_THAT(values(stats.select(0, 1).select(-1, 4)),
                ElementsAre(40 * 48, 5 * 48 * 32, 40 * 48, 5 * 48 * 32, 40 * 32, 40 * 32));
    EXPECT_GT(sqnr(stats).min().item<double>(), 20) << recipe;
    EXPECT_GT(sqnr(layer->shared->experts->stats()).min().item<double>(), 20) << recipe;
    step(layer, x);
    EXPECT_TRUE(at::equal(layer->experts->stats(), 2 * stats)) << recipe;
    layer->experts->reset_stats();
    EXPECT_EQ(energy(layer->experts->stats()), 0);
  }
}

TEST(CollectStats, EqualsTheStatsOfTheTensorsThemselves) {
  nn::MxLinear linear(nn::MxLinearOptions{.in_features = 64, .out_features = 96});
  linear->collect_stats(true);
  const at::Tensor x = at::randn({2, 20, 64}), rows = x.view({40, 64}), w = linear->weight;
  const at::Tensor dy = at::randn({2, 20, 96});
  linear(x).backward(dy);
  const at::Tensor stats = linear->stats();
  ASSERT_EQ(stats.sizes(), at::IntArrayRef({1, kNumStatsParts, kNumStats}));
  for (int64_t i = 0; i < kNumStatsParts; ++i) {
    const std::string_view part = kStatsParts[i];
    const at::Tensor of = part[0] == 'x'   ? rows
                          : part[0] == 'w' ? w.unsqueeze(0)
                                           : dy.view({40, 96});
    EXPECT_TRUE(at::equal(stats[0][i], ops::quantization_stats(of, {.part = part}))) << part;
  }
  linear->to(at::kBFloat16);
  EXPECT_EQ(linear->stats().scalar_type(), at::kDouble);
}

}  // namespace
}  // namespace moxie
