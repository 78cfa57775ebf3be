"""Tests routing, permutation and the MoE layer."""

import random

import pytest
import torch

import moxie
import moxie.nn
from noise import BF16_STEP, E4M3_STEP, difference, rounded
from test_moe_fused import ByStep


def random_ids(tokens: int, top_k: int, num_experts: int, device: str) -> torch.Tensor:
    scores = torch.randn(tokens, num_experts, device=device)
    return moxie.top_k(scores, top_k)


# (tokens, experts, top_k): zero tokens, one expert, one expert per token, many experts
SHAPES = [(0, 4, 2), (1, 1, 1), (7, 1, 1), (33, 5, 1), (64, 8, 2), (50, 7, 7), (300, 256, 8), (129, 33, 4)]


@pytest.mark.parametrize("tokens, experts, top_k", SHAPES)
def test_top_k_takes_the_largest_and_equal_ones_by_id(device, tokens, experts, top_k):
    scores = torch.randint(0, 4, (tokens, experts), device=device).float()  # many are equal
    expected = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :top_k]
    assert torch.equal(moxie.top_k(scores, top_k).long(), expected)


@pytest.mark.parametrize("tokens, experts, top_k", SHAPES)
def test_rows_are_in_order_of_expert_then_token(device, tokens, experts, top_k):
    ids = random_ids(tokens, top_k, experts, device)
    offs, slot_of, row_of = moxie.route(ids, experts)
    expected = torch.sort(ids.flatten(), stable=True).indices
    assert torch.equal(slot_of.long(), expected)
    assert torch.equal(row_of.long()[slot_of.long()], torch.arange(tokens * top_k, device=device))
    assert torch.equal(offs.long(), torch.bincount(ids.flatten().long(), minlength=experts).cumsum(0))


@pytest.mark.parametrize("tokens, experts, top_k", SHAPES)
def test_permute_and_unpermute_have_the_gradients_of_index_and_sum(tokens, experts, top_k):
    ids = random_ids(tokens, top_k, experts, "cpu")
    _, slot_of, row_of = moxie.route(ids, experts)
    x = torch.randn(tokens, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(tokens, top_k, dtype=torch.float64, requires_grad=True)

    def there_and_back(x, weights):
        rows = moxie.permute(x, slot_of, row_of, top_k).sin()
        return moxie.unpermute(rows, slot_of, row_of, tokens, weights=weights)

    if tokens * top_k <= 400:
        torch.autograd.gradcheck(there_and_back, (x, weights))
    assert torch.allclose(there_and_back(x, weights), x.sin() * weights.sum(1, keepdim=True))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_gradients_of_rows_and_weights_are_those_of_the_double_ones(device, dtype):
    tokens, experts, top_k, dim = 65, 6, 3, 50
    ids = random_ids(tokens, top_k, experts, device)
    _, slot_of, row_of = moxie.route(ids, experts)
    values = torch.randn(tokens * top_k, dim, device=device).to(dtype)
    factors = torch.rand(tokens, top_k, device=device)
    dout = torch.randn(tokens, dim, device=device).to(dtype)

    def grads(rows, weights, dout):
        rows, weights = rows.clone().requires_grad_(), weights.clone().requires_grad_()
        out = moxie.unpermute(rows, slot_of, row_of, tokens, weights=weights)
        return out, *torch.autograd.grad(out, (rows, weights), dout)

    actual = grads(values, factors, dout)
    index = row_of.long()
    by_slot = values.double()[index].view(tokens, top_k, dim)
    expected_out = (by_slot * factors.double().unsqueeze(-1)).sum(1)
    expected_rows = (dout.double().unsqueeze(1) * factors.double().unsqueeze(-1)).view(-1, dim)[slot_of.long()]
    expected_weights = (by_slot * dout.double().unsqueeze(1)).sum(-1)
    # Results are rounded once to dtype, after f32 sums of at most 50 products.
    tolerance = 2**-8 if dtype == torch.bfloat16 else 2**-18
    for a, e in zip(actual, (expected_out, expected_rows, expected_weights)):
        assert torch.allclose(a.double(), e, rtol=tolerance, atol=tolerance)


def dense_loop(layer: moxie.nn.MoE, x: torch.Tensor) -> torch.Tensor:
    """Computes the MoE layer in loops over tokens and experts, in the dtype of x."""
    routing = layer.router(x)
    out = []
    for t in range(x.shape[0]):
        y = torch.zeros_like(x[t])
        for j in range(layer.router.top_k):
            e = int(routing.ids[t, j])
            gate, up = (layer.experts.w13[e] @ x[t]).chunk(2)
            y = y + routing.weights[t, j] * (layer.experts.w2[e] @ (torch.nn.functional.silu(gate) * up))
        out.append(y)
    result = torch.stack(out) if out else x * 0
    if layer.shared is not None:
        gate, up = (x @ layer.shared.experts.w13[0].t()).chunk(2, 1)
        result = result + (torch.nn.functional.silu(gate) * up) @ layer.shared.experts.w2[0].t()
    return result


@pytest.mark.parametrize("tokens, experts, top_k", SHAPES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"score": "sigmoid", "normalize": False, "scale": 2.5},
        {"balance": "loss", "z_loss_weight": 1e-3},
        {"score": "sigmoid", "balance": "bias", "shared_hidden_dim": 10},
    ],
    ids=str,
)
def test_the_layer_is_the_dense_loop_in_double_with_all_gradients(tokens, experts, top_k, options):
    torch.manual_seed(tokens)
    layer = moxie.nn.MoE(6, 5, experts, top_k, recipe="identity", dtype=torch.float64, **options)
    x = torch.randn(tokens, 6, dtype=torch.float64, requires_grad=True)
    if options.get("balance") == "bias":
        layer.router.bias.uniform_(-0.5, 0.5)
    parameters = [x, *layer.parameters()]
    y = layer(x)
    actual = torch.autograd.grad(y.square().sum() + layer.loss, parameters, allow_unused=True)
    expected_y = dense_loop(layer, x)
    expected = torch.autograd.grad(expected_y.square().sum() + layer.router(x).loss, parameters, allow_unused=True)
    assert torch.allclose(y, expected_y)
    for a, e in zip(actual, expected):
        e = torch.zeros_like(a) if e is None else e
        assert torch.allclose(a, e, atol=1e-10)


@pytest.mark.parametrize("seed", range(40))
def test_fuzzed_layers_are_every_expert_on_every_token_in_double(seed):
    rng = random.Random(seed)
    experts = rng.choice((1, 2, 3, 5, 8, 16, 31, 64, 100, 256))
    top_k, tokens = rng.randint(1, min(8, experts)), rng.choice((0, 1, 2, 7, 33, 150))
    options = {"score": rng.choice(("softmax", "sigmoid")), "normalize": rng.random() < 0.5}
    options["balance"] = rng.choice(("bias", "loss"))
    layer = moxie.nn.MoE(
        rng.choice((1, 3, 17)),
        rng.choice((1, 5, 12)),
        experts,
        top_k,
        recipe="identity",
        dtype=torch.float64,
        z_loss_weight=1e-2,
        **options,
    )
    router = layer.router
    if options["balance"] == "bias":  # a bias that favours top_k experts, which then get all tokens, or half of the experts
        router.bias[: top_k if seed % 2 else experts // 2] = 10
    x = torch.randn(tokens, layer.experts.w2.shape[1], dtype=torch.float64, requires_grad=True)
    y, leaves = layer(x), [x, *layer.parameters()]
    dy = torch.randn_like(y)

    logits = x @ router.gate.weight.t()
    scores = logits.softmax(-1) if options["score"] == "softmax" else logits.sigmoid()
    ranks = (scores + (router.bias if options["balance"] == "bias" else 0)).float()
    chosen = torch.zeros_like(scores).scatter(1, torch.sort(ranks, dim=1, descending=True, stable=True).indices[:, :top_k], 1.0)
    weights = scores * chosen
    weights = weights / weights.sum(-1, keepdim=True) if options["normalize"] else weights
    gate, up = torch.einsum("td,efd->etf", x, layer.experts.w13).chunk(2, -1)
    expected = torch.einsum("etf,edf,te->td", torch.nn.functional.silu(gate) * up, layer.experts.w2, weights)
    loss = 1e-2 * logits.logsumexp(-1).square().sum() / max(tokens, 1)
    if options["balance"] == "loss":
        share = (scores / scores.sum(-1, keepdim=True)).sum(0) / max(tokens, 1)
        loss = loss + 1e-2 * experts * (chosen.sum(0) / max(tokens * top_k, 1) * share).sum()
    assert torch.equal(router.load, chosen.sum(0).long())
    assert torch.allclose(y, expected) and torch.allclose(layer.loss, loss)
    actual = torch.autograd.grad((y * dy).sum() + layer.loss, leaves)
    for a, e in zip(actual, torch.autograd.grad((expected * dy).sum() + loss, leaves)):
        assert torch.allclose(a, e, atol=1e-10)


@pytest.mark.parametrize("recipe", ("bf16", "mxfp8_rceil", "mxfp8_rceil_128", "fp8_rowwise"))
@pytest.mark.parametrize("tokens, experts, top_k", [*SHAPES, (70, 5, 2)])
def test_the_layer_is_its_unfused_chain_bit_for_bit(device, recipe, tokens, experts, top_k):
    layer = moxie.nn.MoE(64, 96, experts, top_k, recipe=recipe, device=device, dtype=torch.bfloat16)
    x = torch.randn(tokens, 64, device=device, dtype=torch.bfloat16, requires_grad=True)

    def chain(x):
        routing = layer.router(x)
        route = (*moxie.route(routing.ids, experts), top_k)
        return ByStep.apply(x, layer.experts.w13, layer.experts.w2, routing.weights, route, recipe)

    leaves = [x, *layer.parameters()]
    actual, expected = layer(x), chain(x)
    assert torch.equal(actual, expected)
    dy = torch.randn_like(actual)
    for a, e in zip(torch.autograd.grad(actual, leaves, dy), torch.autograd.grad(expected, leaves, dy)):
        assert torch.equal(a, e)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("score", ("softmax", "sigmoid"))
@pytest.mark.parametrize("tokens, experts, top_k", [shape for shape in SHAPES if shape[0]] + [(2, 3, 2), (15, 31, 3)])
def test_two_runs_are_bit_equal_and_permuting_tokens_permutes_the_outputs(device, tokens, experts, top_k, score, dtype):
    layer = moxie.nn.MoE(130, 96, experts, top_k, score=score, device=device, dtype=dtype)
    x = torch.randn(tokens, 130, device=device, dtype=dtype)
    order = torch.randperm(tokens, device=device)
    y = layer(x)
    assert torch.equal(y, layer(x))
    assert torch.equal(y[order], layer(x[order]))


def test_the_layer_compiles_as_one_graph_with_its_backward(device):
    layer = moxie.nn.MoE(64, 96, 4, 2, device=device, dtype=torch.bfloat16, balance="bias", score="sigmoid")
    compiled = torch.compile(layer, fullgraph=True)
    for tokens in (40, 64, 51):
        x = torch.randn(tokens, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(tokens, 64, device=device, dtype=torch.bfloat16)
        leaves = [x, *layer.parameters()]
        y, expected = compiled(x), layer(x)
        grads, expected_grads = torch.autograd.grad(y, leaves, dy), torch.autograd.grad(expected, leaves, dy)
        # Eager mode rounds both gradients of x, from the router and from the experts, and then their sum. Inductor rounds
        # only the sum. The router's gradient, the smaller one, is rounded by a quarter of a step on average.
        of_dx = rounded(BF16_STEP / 4, BF16_STEP, count=x.numel())
        if device == "cpu":
            assert torch.equal(y, expected)
            assert all(torch.equal(a, e) for a, e in zip(grads[1:], expected_grads[1:]))
            assert difference(grads[0], expected_grads[0]) <= of_dx
            continue
        # On a GPU inductor's sigmoid and division differ from eager mode's by a few f32 ulps, so the routing weights differ.
        # y is rounded once after it is weighted; the weighted dy is rounded and quantized, and so is its product with w2.
        of_weights = 2.0**-21
        assert difference(y, expected) <= rounded(of_weights, BF16_STEP, count=y.numel())
        of_dy = rounded(of_weights, BF16_STEP, E4M3_STEP, count=2 * y.numel())
        of_dh = rounded(of_dy, BF16_STEP, BF16_STEP, E4M3_STEP, count=2 * tokens * 2 * 96)
        of_dx += rounded(of_dh, BF16_STEP, BF16_STEP, count=x.numel())
        budgets = [of_dx, *(rounded(of_dh, BF16_STEP, count=parameter.numel()) for parameter in layer.parameters())]
        for a, e, budget in zip(grads, expected_grads, budgets, strict=True):
            assert difference(a, e) <= budget


def test_the_bias_moves_against_the_load(device):
    router = moxie.nn.Router(8, 4, 1, score="sigmoid", balance="bias", device=device)
    with torch.no_grad():
        router.gate.weight.zero_()
        router.gate.weight[2] = 1
    x = torch.ones(16, 8, device=device)
    assert router(x).ids.flatten().tolist() == [2] * 16
    assert router.load.tolist() == [0, 0, 16, 0]
    for _ in range(1000):
        router.update_bias_()
        if router(x).ids[0, 0] != 2:
            break
    assert router(x).ids[0, 0] != 2
    assert router.bias[2] < 0 < router.bias[0]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: moxie.top_k(torch.zeros(3, 4), 5), "top_k: k must be 1 to the 4 experts"),
        (lambda: moxie.route(torch.tensor([[4]], dtype=torch.int32), 4), "route: ids must be 0 to 3, got 4 at slot 0"),
        (lambda: moxie.route(torch.zeros(3, dtype=torch.int32), 4), "route: ids must be \\[tokens, top_k\\], got 1 dims"),
        (
            lambda: moxie.permute(torch.zeros(3, 4), *[torch.zeros(5, dtype=torch.int32)] * 2, 2),
            "permute: slot_of must be \\[6\\]",
        ),
        (
            lambda: moxie.permute(torch.zeros(3, 4), *[torch.full((6,), 9, dtype=torch.int32)] * 2, 2),
            "slot_of must be 0 to 5, got 9",
        ),
        (lambda: moxie.nn.MoE(8, 8, 4, 2)(torch.zeros(3, 7)), "gate_logits: x must be \\[3, 8\\], got \\[3, 7\\]"),
        (lambda: moxie.gate_logits(torch.zeros(3), torch.zeros(2, 3)), "gate_logits: x must be a matrix, got 1 dims"),
        (lambda: moxie.nn.MoE(8, 8, 4, 2, recipe="fp4"), "there is no recipe 'fp4'"),
        (lambda: moxie.nn.Router(8, 4, 5), "Router: top_k must be 1 to the 4 experts, got 5"),
        (lambda: moxie.nn.Router(8, 4, 1, score="relu"), "Router: score must be one of softmax, sigmoid, got 'relu'"),
    ],
)
def test_a_bad_call_says_the_op_the_rule_and_the_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("score", ("softmax", "sigmoid"))
def test_the_router_computes_in_f32_under_autocast(device, score):
    layer = moxie.nn.MoE(64, 96, 16, 2, score=score, device=device)
    x = torch.randn(200, 64, device=device)
    expected = layer.router(x)
    with torch.autocast(device, dtype=torch.bfloat16):
        routing = layer.router(x)
        y = layer(x)
    assert torch.equal(routing.ids, expected.ids) and torch.equal(routing.weights, expected.weights)
    y.float().sum().backward()


def test_no_tokens_have_gradients_of_zero(device):
    layer = moxie.nn.MoE(64, 96, 4, 2, device=device)
    x = torch.randn(0, 64, device=device, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == (0, 64) and layer.experts.w13.grad.abs().sum() == 0
    rows = torch.randn(0, 8, device=device, requires_grad=True)
    empty = torch.zeros(0, dtype=torch.int32, device=device)
    moxie.unpermute(rows, empty, empty, 0).sum().backward()
    assert rows.grad.shape == (0, 8)


def test_weights_of_permute_that_want_a_gradient_are_refused():
    index = torch.arange(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="permute: weights get no gradient here"):
        moxie.permute(torch.randn(2, 3), index, index, 1, weights=torch.ones(2, 1, requires_grad=True))
