// The MoE layer from C++.
#include "moxie/torch/nn/moe.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

namespace moxie::nn {
namespace {

MoeOptions small(const std::string& recipe, at::ScalarType dtype) {
  return {.router = {.dim = 32,
                     .num_experts = 5,
                     .top_k = 2,
                     .balance = Balance::kLoss,
                     .tensor = at::TensorOptions().dtype(dtype)},
          .hidden_dim = 48,
          .shared_hidden_dim = 16,
          .recipe = recipe};
}

// One expert's MLP as matrices.
at::Tensor mlp(const at::Tensor& x, const at::Tensor& w13, const at::Tensor& w2) {
  const auto h = x.matmul(w13.t()).chunk(2, -1);
  return (at::silu(h[0]) * h[1]).matmul(w2.t());
}

TEST(Moe, IsTheDenseLoopInDouble) {
  Moe layer(small("identity", at::kDouble));
  const at::Tensor x = at::randn({20, 32}, at::kDouble);
  const Routing routing = layer->router(x);
  at::Tensor expected = mlp(x, layer->shared->w13[0], layer->shared->w2[0]);
  for (int64_t t = 0; t < 20; ++t)
    for (int64_t j = 0; j < 2; ++j) {
      const auto e = routing.ids[t][j].item<int64_t>();
      expected[t] +=
          routing.weights[t][j] * mlp(x[t], layer->experts->w13[e], layer->experts->w2[e]);
    }
  EXPECT_TRUE(at::allclose(layer(x), expected));
}

TEST(Moe, TrainsEveryParameterInMxfp8) {
  Moe layer(small("mxfp8_rceil_128", at::kFloat));
  const at::Tensor y = layer(at::randn({4, 20, 32}));
  (y.square().mean() + layer->loss).backward();
  for (const auto& parameter : layer->named_parameters()) {
    ASSERT_TRUE(parameter.value().grad().defined()) << parameter.key();
    EXPECT_GT(parameter.value().grad().abs().max().item<float>(), 0) << parameter.key();
  }
  EXPECT_EQ(layer->router->load.sum().item<int64_t>(), 4 * 20 * 2);
}

TEST(Moe, LoadsWeightsThatAreApartAndTransposed) {
  GroupedExperts experts(
      ExpertsOptions{.dim = 8, .hidden_dim = 6, .num_experts = 3, .weight_cache = true});
  const at::Tensor w1 = at::randn({3, 8, 6}), w3 = at::randn({3, 8, 6}), w2 = at::randn({3, 6, 8});
  experts->load_weights({.w1 = w1, .w3 = w3, .w2 = w2, .transposed = true});
  EXPECT_TRUE(at::equal(experts->w13[1].slice(0, 0, 6), w1[1].t()));
  EXPECT_TRUE(at::equal(experts->w13[1].slice(0, 6), w3[1].t()));
  EXPECT_TRUE(at::equal(experts->w2[2], w2[2].t()));
  EXPECT_ANY_THROW(experts->load_weights({.w1 = w1}));
  EXPECT_ANY_THROW(experts->load_weights({.w2 = w2}));
}

}  // namespace
}  // namespace moxie::nn
