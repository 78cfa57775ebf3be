"""Routing, permutation and the MoE layer."""

import pytest
import torch

import moxie
import moxie.nn
from support import as_bytes


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
    # One rounding to dtype, after f32 sums of at most 50 products.
    tolerance = 2**-8 if dtype == torch.bfloat16 else 2**-18
    for a, e in zip(actual, (expected_out, expected_rows, expected_weights)):
        assert torch.allclose(a.double(), e, rtol=tolerance, atol=tolerance)


def dense_loop(layer: moxie.nn.MoE, x: torch.Tensor) -> torch.Tensor:
    """The layer as loops over tokens and experts, in the dtype of x."""
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
@pytest.mark.parametrize("options", [
    {}, {"score": "sigmoid", "normalize": False, "scale": 2.5}, {"balance": "loss", "z_loss_weight": 1e-3},
    {"score": "sigmoid", "balance": "bias", "shared_hidden_dim": 10}], ids=str)
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


@pytest.mark.parametrize("recipe", ("bf16", "mxfp8_rceil", "mxfp8_rceil_128", "fp8_rowwise"))
def test_the_layer_is_its_unfused_chain_bit_for_bit(device, recipe):
    layer = moxie.nn.MoE(64, 96, 5, 2, recipe=recipe, device=device, dtype=torch.bfloat16)
    x = torch.randn(70, 64, device=device, dtype=torch.bfloat16, requires_grad=True)

    def chain(x):
        routing = layer.router(x)
        offs, slot_of, row_of = moxie.route(routing.ids, 5)
        rows = moxie.permute(x, slot_of, row_of, 2)
        h = moxie.grouped_mm(rows, layer.experts.w13, offs, recipe=recipe)
        y = moxie.grouped_mm(moxie.swiglu(h), layer.experts.w2, offs, recipe=recipe)
        return moxie.unpermute(y, slot_of, row_of, 70, weights=routing.weights)

    parameters = [x, *layer.parameters()]
    actual, expected = layer(x), chain(x)
    assert torch.equal(actual, expected)
    dy = torch.randn_like(actual)
    for a, e in zip(torch.autograd.grad(actual, parameters, dy), torch.autograd.grad(expected, parameters, dy)):
        assert torch.equal(a, e)


def test_two_runs_are_bit_equal_and_permuting_tokens_permutes_the_outputs(device):
    layer = moxie.nn.MoE(64, 96, 7, 3, device=device, dtype=torch.bfloat16)
    x = torch.randn(90, 64, device=device, dtype=torch.bfloat16)
    order = torch.randperm(90, device=device)
    y = layer(x)
    assert torch.equal(y, layer(x))
    assert torch.equal(y[order], layer(x[order]))


def test_the_layer_compiles_as_one_graph_with_its_backward(device):
    layer = moxie.nn.MoE(64, 96, 4, 2, device=device, dtype=torch.bfloat16, balance="bias", score="sigmoid")
    compiled = torch.compile(layer, fullgraph=True)
    for tokens in (40, 64, 51):
        x = torch.randn(tokens, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        leaves = [x, *layer.parameters()]
        y, expected = compiled(x), layer(x)
        grads, expected_grads = torch.autograd.grad(y.sum(), leaves), torch.autograd.grad(expected.sum(), leaves)
        if device == "cpu":
            assert torch.equal(y, expected)
            assert all(torch.equal(a, e) for a, e in zip(grads[1:], expected_grads[1:]))
            # Inductor adds the two gradients of x, from the router and from the experts, before it rounds them to bf16.
            assert (grads[0] - expected_grads[0]).float().norm() <= 2**-8 * expected_grads[0].float().norm()
        else:  # its sigmoid is another one there, and with it the weight of every row
            assert torch.allclose(y.float(), expected.float(), atol=2**-6, rtol=2**-6)
            for a, e in zip(grads, expected_grads):
                assert torch.allclose(a.float(), e.float(), atol=2**-4, rtol=2**-4)


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


def test_weights_load_from_the_common_layouts():
    experts = moxie.nn.GroupedExperts(8, 6, 3, weight_cache=True)
    w1, w3, w2 = torch.randn(3, 6, 8), torch.randn(3, 6, 8), torch.randn(3, 8, 6)
    offs = torch.tensor([2, 2, 5], dtype=torch.int32)
    x = torch.randn(5, 8)
    experts.load_weights_(w1=w1, w2=w2, w3=w3)
    expected = experts(x, offs)
    assert torch.equal(experts.w13, torch.cat([w1, w3], 1))
    experts.load_weights_(w1=list(w1), w2=list(w2), w3=list(w3))
    assert torch.equal(experts(x, offs), expected)
    experts.load_weights_(w13=torch.cat([w1, w3], 1).mT, w2=w2.mT, transposed=True)
    assert torch.equal(experts(x, offs), expected)
    assert as_bytes(experts.cache13.qdata).equal(as_bytes(moxie.quantize_weights(experts.w13.detach())[0]))
    with pytest.raises(ValueError, match=r"w2 must be \[3, 8, 6\], got \[3, 6, 8\] \(is it transposed\?\)"):
        experts.load_weights_(w2=w2.mT)
    with pytest.raises(ValueError, match="give w1 and w3 together"):
        experts.load_weights_(w1=w1)


@pytest.mark.parametrize("call, message", [
    (lambda: moxie.top_k(torch.zeros(3, 4), 5), "top_k: k must be 1 to the 4 experts"),
    (lambda: moxie.route(torch.tensor([[4]], dtype=torch.int32), 4), "route: ids must be 0 to 3, got 4 at slot 0"),
    (lambda: moxie.route(torch.zeros(3, dtype=torch.int32), 4), "route: ids must be \\[tokens, top_k\\], got 1 dims"),
    (lambda: moxie.permute(torch.zeros(3, 4), *[torch.zeros(5, dtype=torch.int32)] * 2, 2), "permute: slot_of must be \\[6\\]"),
    (lambda: moxie.permute(torch.zeros(3, 4), *[torch.full((6,), 9, dtype=torch.int32)] * 2, 2), "slot_of must be 0 to 5, got 9"),
    (lambda: moxie.nn.Router(8, 4, 5), "Router: top_k must be 1 to the 4 experts, got 5"),
    (lambda: moxie.nn.Router(8, 4, 1, score="relu"), "Router: score must be one of softmax, sigmoid, got 'relu'"),
])
def test_a_bad_call_says_the_op_the_rule_and_the_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("recipe", ("bf16", "fp8_rowwise", "mxfp8_rceil", "mxfp8_floor", "mxfp8_rceil_128"))
def test_statistics_count_what_a_recipe_loses(device, recipe):
    x = torch.randn(40, 256, device=device)
    x[3, 5] = 2.0**-60  # far below its block
    signal, noise, flushed, clipped, count = moxie.quantization_stats(x, recipe=recipe).tolist()
    assert count == x.numel() and abs(signal - x.double().square().sum().item()) < 1e-6 * signal
    assert 0 < noise < signal * 10**-2.5
    assert flushed == (0 if recipe == "bf16" else 1)
    assert (clipped > 0) == (recipe == "mxfp8_floor")


def test_the_layer_adds_up_statistics_until_they_are_reset(device):
    layer = moxie.nn.MoE(64, 96, 4, 2, device=device, collect_stats=True)
    layer(torch.randn(30, 64, device=device))
    once = layer.experts.stats.clone()
    layer(torch.randn(30, 64, device=device))
    assert torch.equal(layer.experts.stats[1:], 2 * once[1:]) and layer.experts.stats[0, -1] == 2 * 60 * 64
    assert all(25 < moxie.sqnr(stats) < 40 for stats in layer.experts.stats)
    layer.experts.reset_stats_()
    assert layer.experts.stats.abs().sum() == 0 and "stats" not in "".join(layer.state_dict())


def test_checkpointing_gives_the_same_bytes(device):
    from torch.utils.checkpoint import checkpoint

    layer = moxie.nn.MoE(64, 96, 4, 2, device=device, dtype=torch.bfloat16)
    x = torch.randn(30, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    leaves = [x, *layer.parameters()]
    expected = torch.autograd.grad(layer(x).square().sum(), leaves)
    again = checkpoint(layer, x, use_reentrant=False)
    for a, e in zip(torch.autograd.grad(again.square().sum(), leaves), expected):
        assert torch.equal(a, e)


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


def test_a_replaced_parameter_is_the_one_that_is_refreshed():
    layer, other = (moxie.nn.MoE(64, 96, 4, 2, weight_cache=True, shared_hidden_dim=32) for _ in range(2))
    layer.load_state_dict(other.state_dict(), assign=True)
    layer.refresh_()
    x = torch.randn(20, 64)
    assert torch.equal(layer(x), other(x))


def test_no_tokens_have_gradients_of_zero(device):
    layer = moxie.nn.MoE(64, 96, 4, 2, device=device)
    x = torch.randn(0, 64, device=device, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == (0, 64) and layer.experts.w13.grad.abs().sum() == 0
    rows = torch.randn(0, 8, device=device, requires_grad=True)
    empty = torch.zeros(0, dtype=torch.int32, device=device)
    moxie.unpermute(rows, empty, empty, 0).sum().backward()
    assert rows.grad.shape == (0, 8)


def test_a_layer_can_be_copied_after_a_forward_pass():
    import copy

    layer = moxie.nn.MoE(64, 96, 4, 2, balance="loss")
    x = torch.randn(20, 64)
    y = layer(x)
    assert layer.loss.requires_grad
    assert torch.equal(copy.deepcopy(layer)(x), y)


def test_load_counts_training_alone_and_the_bias_stays_f32():
    router = moxie.nn.Router(8, 4, 2, balance="bias")
    router.eval()(torch.randn(5, 8))
    assert router.load.sum() == 0
    router.train()(torch.randn(5, 8))
    assert router.load.sum() == 10
    router.bias.fill_(0.3)
    assert router.bfloat16().bias.dtype == torch.float32 and router.bias[0] == torch.tensor(0.3)


def test_weights_of_permute_that_want_a_gradient_are_refused():
    index = torch.arange(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="permute: weights get no gradient here"):
        moxie.permute(torch.randn(2, 3), index, index, 1, weights=torch.ones(2, 1, requires_grad=True))
