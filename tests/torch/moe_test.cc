// Tests the MoE layer from C++.
#include "moxie/torch/nn/moe.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/serialize.h>

#include <sstream>

namespace moxie::nn {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

template <class Body>
std::string message_of(const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no exception";
}

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

// The weights of one expert, a matrix each.
at::Tensor mlp(const at::Tensor& x, const at::Tensor& w13, const at::Tensor& w2) {
  const auto h = x.matmul(w13.t()).chunk(2, -1);
  return (at::silu(h[0]) * h[1]).matmul(w2.t());
}

TEST(Moe, MatchesADenseLoopInDouble) {
  Moe layer(small("identity", at::kDouble));
  const at::Tensor x = at::randn({20, 32}, at::kDouble);
  const Routing routing = layer->router(x);
  at::Tensor expected = mlp(x, layer->shared->experts->w13[0], layer->shared->experts->w2[0]);
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
  EXPECT_EQ(layer->router->load().sum().item<int64_t>(), 4 * 20 * 2);
}

TEST(Moe, IsItsUnfusedStepsBitForBit) {
  for (const std::string recipe : {"mxfp8_rceil_128", "mxfp8_rceil_wgrad_with_hp", "bf16"}) {
    MoeOptions options = small(recipe, at::kBFloat16);
    options.shared_hidden_dim = 0;
    Moe layer(options);
    const at::Tensor x = at::randn({500, 32}, at::kBFloat16).set_requires_grad(true);
    const at::Tensor dy = at::randn({500, 32}, at::kBFloat16);
    const auto grads_of = [&](const at::Tensor& y) {
      layer->zero_grad();
      x.mutable_grad() = at::Tensor();
      y.backward(dy);
      std::vector<at::Tensor> grads = {x.grad().clone()};
      for (const at::Tensor& parameter : layer->parameters())
        grads.push_back(parameter.grad().clone());
      return grads;
    };
    const at::Tensor y = layer(x);
    const std::vector<at::Tensor> grads = grads_of(y);
    const Routing routing = layer->router(x);
    const auto [offs, slot_of, row_of] = ops::route(routing.ids, 5);
    const at::Tensor rows = ops::permute(x.detach(), slot_of, row_of, 2);
    const at::Tensor w13 = layer->experts->w13, w2 = layer->experts->w2;
    const ops::GroupedMmOptions how{.offs = offs, .recipe = recipe};
    const at::Tensor h = ops::grouped_mm(rows, w13, how).detach();
    const at::Tensor chain = ops::unpermute(ops::grouped_mm(ops::swiglu(h), w2, how), slot_of,
                                            row_of, 500, routing.weights);
    EXPECT_TRUE(at::equal(y, chain)) << recipe;
    // Gradients: the layer quantizes dy without the routing weights and applies them in SwiGLU's
    // backward, so the separate steps do that too.
    const auto linear = [&](const at::Tensor& input, const at::Tensor& w, const at::Tensor& grad) {
      const at::Tensor leaf = input.detach().set_requires_grad(true);
      return torch::autograd::grad({ops::grouped_mm(leaf, w, how)}, {leaf, w}, {grad});
    };
    const at::Tensor dy_rows = ops::permute(dy, slot_of, row_of, 2);
    const at::Tensor weights = routing.weights.detach();
    const at::Tensor da = linear(ops::swiglu(h), w2, dy_rows)[0];
    const at::Tensor dw2 = linear(ops::weighted_swiglu(h, weights, slot_of), w2, dy_rows)[1];
    const auto [dh, dweights] = ops::weighted_swiglu_backward(da, h, weights, slot_of);
    const auto of_up = linear(rows, w13, dh);
    const at::Tensor gate = layer->router->gate->weight;
    const auto of_router = torch::autograd::grad({routing.weights}, {x, gate}, {dweights});
    const at::Tensor dx = ops::unpermute(of_up[0], slot_of, row_of, 500) + of_router[0];
    const std::vector<at::Tensor> expected = {dx, of_router[1], of_up[1], dw2};
    ASSERT_EQ(grads.size(), expected.size());
    for (size_t i = 0; i < grads.size(); ++i)
      EXPECT_TRUE(at::equal(grads[i], expected[i])) << recipe << ", gradient " << i;
  }
}

// tests/python/test_moe_layer.py checks that Python's module has the same names, so state dicts can
// be exchanged.
TEST(Moe, HasTheNamesOfTheStateDictOfPython) {
  MoeOptions options = small("bf16", at::kFloat);
  options.router.balance = Balance::kBias;
  options.collect_stats = options.weight_cache = true;
  Moe layer(options);
  layer(at::randn({20, 32}));
  EXPECT_THAT(layer->named_parameters().keys(),
              ElementsAre("router.gate.weight", "experts.w13", "experts.w2", "shared.experts.w13",
                          "shared.experts.w2"));
  EXPECT_THAT(layer->named_buffers().keys(), ElementsAre("router.bias"));
}

TEST(Moe, ComesBackFromAnArchive) {
  Moe layer(small("mxfp8_rceil_128", at::kFloat)), other(small("mxfp8_rceil_128", at::kFloat));
  const at::Tensor x = at::randn({20, 32});
  std::stringstream file;
  torch::save(layer, file);
  torch::load(other, file);
  EXPECT_TRUE(at::equal(layer(x), other(x)));
}

TEST(Router, KeepsItsBiasInF32AndCountsInTrainingAlone) {
  Router router(RouterOptions{.dim = 8, .num_experts = 4, .top_k = 2, .balance = Balance::kBias});
  router->eval();
  router(at::randn({5, 8}));
  EXPECT_EQ(router->load().sum().item<int64_t>(), 0);
  router->train();
  const Routing routing = router(at::randn({5, 8}));
  EXPECT_EQ(router->load().sum().item<int64_t>(), 10);
  router->update_bias();
  const at::Tensor bias = router->bias.clone();
  EXPECT_GT(bias.abs().max().item<float>(), 0);
  router->to(at::kBFloat16);
  EXPECT_EQ(router->gate->weight.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(at::equal(router->bias, bias));  // at::equal also needs equal dtypes: still f32
  EXPECT_TRUE(at::equal(router->named_buffers()["bias"], bias));
  EXPECT_THAT(message_of([] {
                Router(RouterOptions{.dim = 8, .num_experts = 4, .top_k = 2})->update_bias();
              }),
              HasSubstr("Router: update_bias is for routers whose balance is kBias"));
}

TEST(Experts, LoadWeightsFromTheCommonLayouts) {
  const ExpertsOptions options{.dim = 8, .hidden_dim = 6, .num_experts = 3, .weight_cache = true};
  GroupedExperts experts(options), other(options);
  const at::Tensor w1 = at::randn({3, 6, 8}), w3 = at::randn({3, 6, 8}), w2 = at::randn({3, 8, 6});
  const at::Tensor w13 = at::cat({w1, w3}, 1);
  const at::Tensor rows = at::randn({5, 8}), offs = at::tensor({2, 2, 5}, at::kInt);
  experts->load_weights({.w1 = w1, .w3 = w3, .w2 = w2});
  EXPECT_TRUE(at::equal(experts->w13, w13) && at::equal(experts->w2, w2));
  const at::Tensor expected = experts(rows, std::optional(offs));
  const auto loads = [&](const ExpertWeights& weights) {
    other->load_weights({.w13 = at::zeros_like(w13), .w2 = at::zeros_like(w2)});
    other->load_weights(weights);
    // The product uses the weight caches, so this shows that loading refreshed them.
    return at::equal(other(rows, std::optional(offs)), expected);
  };
  EXPECT_TRUE(loads({.w13 = w13, .w2 = w2}));
  EXPECT_TRUE(loads({.w1 = w1.unbind(), .w3 = w3.unbind(), .w2 = w2.unbind()}));
  EXPECT_TRUE(loads({.w1 = w1.mT(), .w3 = w3.mT(), .w2 = w2.mT(), .transposed = true}));
  EXPECT_TRUE(loads({.w13 = w13.mT().unbind(), .w2 = w2.mT().unbind(), .transposed = true}));
}

// Experts that keep gpt-oss's weights as they are stored (transposed, gate and up interleaved) give
// the results of experts in Moxie's layout.
TEST(Experts, TakeGptOssAsItIsStored) {
  constexpr int64_t kExperts = 3, kDim = 32, kHidden = 48, kRows = 20;
  const at::Tensor w13 = at::randn({kExperts, kDim, 2 * kHidden}),
                   b13 = at::randn({kExperts, 2 * kHidden}),
                   w2 = at::randn({kExperts, kHidden, kDim}), b2 = at::randn({kExperts, kDim});
  const ExpertWeights given{.w13 = Matrices(w13),
                            .w2 = Matrices(w2),
                            .b13 = b13,
                            .b2 = b2,
                            .transposed = true,
                            .interleaved = true};
  const at::Tensor x = at::randn({kRows, kDim}), dy = at::randn({kRows, kDim});
  const at::Tensor offs = at::tensor({7, 7, 20}, at::kInt);
  for (const bool cached : {false, true}) {
    ExpertsOptions options{.dim = kDim,
                           .hidden_dim = kHidden,
                           .num_experts = kExperts,
                           .weight_cache = cached,
                           .activation = "clamped_swiglu",
                           .bias = true};
    GroupedExperts plain(options);
    options.w13_layout = "interleaved";
    options.transposed = true;
    GroupedExperts stored(options);
    for (GroupedExperts& experts : {std::ref(plain), std::ref(stored)})
      experts->load_weights(given);
    EXPECT_TRUE(at::equal(stored->w13, w13) && at::equal(stored->b13, b13));
    const at::Tensor y = stored(x, std::optional(offs)), expected = plain(x, std::optional(offs));
    EXPECT_TRUE(at::equal(y, expected));
    y.backward(dy);
    expected.backward(dy);
    EXPECT_TRUE(at::equal(stored->w2.grad(), plain->w2.grad().mT()));
    EXPECT_TRUE(at::equal(stored->b2.grad(), plain->b2.grad()));
    const auto in_turn = [](const at::Tensor& rows) {
      return rows.unflatten(1, {2, -1}).transpose(1, 2).flatten(1, 2);
    };
    EXPECT_TRUE(at::equal(stored->w13.grad(), in_turn(plain->w13.grad()).mT()));
    EXPECT_TRUE(at::equal(stored->b13.grad(), in_turn(plain->b13.grad())));

    const at::Tensor sum13 = at::zeros_like(w13), sum2 = at::zeros_like(w2);
    const at::Tensor dw13 = stored->w13.grad().clone(), dw2 = stored->w2.grad().clone();
    stored->zero_grad();
    stored->set_main_grads(sum13, sum2);
    stored(x, std::optional(offs)).backward(dy);
    EXPECT_TRUE(at::equal(sum13, dw13) && at::equal(sum2, dw2));
    EXPECT_FALSE(stored->w13.grad().defined());
  }
}

TEST(Experts, LoadNothingWhereOneOfTheWeightsDoesNotFit) {
  GroupedExperts experts(ExpertsOptions{.dim = 8, .hidden_dim = 6, .num_experts = 3});
  const at::Tensor before = experts->w13.detach().clone(), w2 = at::randn({3, 8, 6});
  const auto refusal = [&](const ExpertWeights& weights) {
    return message_of([&] { experts->load_weights(weights); });
  };
  EXPECT_THAT(refusal({.w1 = at::randn({3, 6, 8})}),
              HasSubstr("GroupedExperts.load_weights: give w1 and w3 together, or w13 alone"));
  EXPECT_THAT(refusal({.w13 = at::randn({3, 12, 8}), .w2 = w2.mT()}),
              HasSubstr("w2 must be [3, 8, 6], got [3, 6, 8] (is it transposed?)"));
  EXPECT_THAT(refusal({.w1 = at::randn({3, 7, 8}), .w3 = at::randn({3, 5, 8})}),
              HasSubstr("w1 must be [3, 6, 8], got [3, 7, 8]"));
  EXPECT_THAT(refusal({.w13 = at::randn({12, 8})}),
              HasSubstr("w13 must be a matrix per expert, got [12, 8]"));
  EXPECT_TRUE(at::equal(experts->w13, before));
}

}  // namespace
}  // namespace moxie::nn
