"""What a router computes: logits, the choice of experts, their weights, and the gradients of all these."""

import contextlib

import pytest
import torch
from torch.library import opcheck

import moxie
import moxie.nn
from support import assert_same_bytes

ops = torch.ops.moxie

# (tokens, experts, k), among them no tokens, one expert, all experts chosen, and more experts than a warp has lanes
SHAPES = [(0, 4, 2), (1, 1, 1), (7, 1, 1), (33, 5, 5), (64, 8, 2), (129, 33, 4), (300, 256, 8), (20, 1000, 64)]
OPTIONS = [
    {},
    {"normalize": False},
    {"scale": 2.5},
    {"sigmoid": True},
    {"sigmoid": True, "normalize": False, "scale": 0.5},
]


def make(tokens: int, experts: int, device: str, with_bias: bool = False):
    logits = torch.randn(tokens, experts, device=device) * 2
    return logits, torch.rand(experts, device=device) if with_bias else None


def reference(logits, bias, k: int, sigmoid=False, normalize=True, scale=1.0):
    """Computes ids and weights with torch's ops in f64. Experts are ranked by their scores rounded to f32; the weights are
    differentiable."""
    wide = logits.double()
    scores = wide.sigmoid() if sigmoid else wide.softmax(-1)
    ranks = scores.detach().float() + (0 if bias is None else bias)
    ids = torch.sort(ranks, dim=1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, ids)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights * scale


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64))
@pytest.mark.parametrize("wants", ((True, True), (True, False), (False, True)), ids=str)
def test_a_choice_from_tokens_is_that_from_their_logits(device, dtype, wants):
    x, weight = torch.randn(33, 48, device=device, dtype=dtype), torch.randn(9, 48, device=device, dtype=dtype)
    bias = torch.rand(9, device=device)
    dweights = torch.randn(33, 3, device=device).to(torch.promote_types(dtype, torch.float32))

    def run(choose):
        leaves = [one.clone().requires_grad_(wanted) for one, wanted in zip((x, weight), wants)]
        weights, ids, counts = choose(*leaves)
        assert not ids.requires_grad and not counts.requires_grad
        grads = torch.autograd.grad(weights, [leaf for leaf in leaves if leaf.requires_grad], dweights)
        return [weights.detach(), ids, counts, *grads]

    how = {"sigmoid": True, "normalize": False, "scale": 0.5}
    expected = run(lambda x, weight: ops._select_experts(moxie.gate_logits(x, weight), bias, 3, **how))
    for got, wanted in zip(run(lambda x, weight: ops._choose_experts(x, weight, bias, 3, **how)), expected, strict=True):
        assert_same_bytes(got, wanted)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64))
@pytest.mark.parametrize("used", ("weights", "tokens", "both"))
@pytest.mark.parametrize("wants", ((True, True), (True, False), (False, True)), ids=str)
def test_a_choice_that_returns_x_adds_the_gradient_of_it(device, dtype, used, wants):
    x, weight = torch.randn(33, 48, device=device, dtype=dtype), torch.randn(9, 48, device=device, dtype=dtype)
    dtokens, load = torch.randn_like(x), torch.arange(9, device=device)
    dweights = torch.randn(33, 3, device=device).to(torch.promote_types(dtype, torch.float32))

    def run(choose):
        leaves = [one.clone().requires_grad_(wanted) for one, wanted in zip((x, weight), wants)]
        weights, ids, tokens, counted = choose(*leaves)
        ends = [(weights, dweights)] * (used != "tokens") + [(tokens, dtokens)] * (used != "weights")
        ends = [(end, grad) for end, grad in ends if end.requires_grad]
        if ends:
            torch.autograd.backward(*zip(*ends))
        return [weights.detach(), ids, tokens.detach(), counted, *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    def once(x, weight):
        counted = load.clone()
        weights, ids, tokens = ops._choose_experts_once(x, weight, None, 3, False, True, 1.0, counted)
        assert tokens.data_ptr() == x.data_ptr() and not ids.requires_grad
        return weights, ids, tokens, counted

    def apart(x, weight):
        tokens = x.view(x.shape)
        weights, ids, counts = ops._choose_experts(tokens, weight, None, 3)
        return weights, ids, tokens, load + counts

    for got, wanted in zip(run(once), run(apart), strict=True):
        assert_same_bytes(got, wanted)


def test_tokens_are_counted_once_and_not_without_a_load(device):
    x, weight = torch.randn(5, 16, device=device), torch.randn(4, 16, device=device, requires_grad=True)
    load = torch.zeros(4, device=device, dtype=torch.int64)

    def choose(x):
        return ops._choose_experts_once(x, weight, None, 2, False, True, 1.0, load)[0]

    before = load._version
    torch.utils.checkpoint.checkpoint(choose, x, use_reentrant=False).sum().backward()  # runs forward again in backward
    assert load.sum() == 10 and load._version == before + 1
    ops._choose_experts_once(x, weight, None, 2, False, True, 1.0, None)
    with torch.inference_mode():
        same = ops._choose_experts_once(x, weight, None, 2, False, True, 1.0, load)[2]
    assert load.sum() == 20 and torch.equal(same, x)


@pytest.mark.parametrize("shared", (None, 32))
@pytest.mark.parametrize("shape", ((40, 32), (4, 10, 32)), ids=str)
def test_a_layer_that_joins_gradients_gives_the_same_bytes(device, monkeypatch, shape, shared):
    layer = moxie.nn.MoE(32, 64, 4, 2, shared_hidden_dim=shared, device=device, dtype=torch.bfloat16)
    x, dy = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))

    def run():
        layer.zero_grad()
        layer.router.reset_load_()
        leaf = x.clone().requires_grad_()
        tokens = leaf * 1  # not a leaf, so that its gradients add up in the order in which they arrive
        y = layer(tokens) + tokens
        y.backward(dy)
        return [y.detach(), leaf.grad, layer.router.load.clone(), *(parameter.grad for parameter in layer.parameters())]

    joined = run()
    monkeypatch.setattr(moxie.nn.Router, "joins_gradients", False)
    assert_same_bytes(run(), joined)


class FrozenRouter(moxie.nn.Router):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


class OtherRouter(torch.nn.Module):
    num_experts, top_k, member, has_loss = 4, 2, None, False

    def forward(self, x):
        ids = torch.arange(2, dtype=torch.int32, device=x.device).expand(len(x), 2).contiguous()
        return moxie.nn.Routing(ids, x.new_full((len(x), 2), 0.5, dtype=torch.float32))


@pytest.mark.parametrize("router", ("detached", "zeros", "f32", "frozen", "other"))
@pytest.mark.parametrize("shape", ((12, 32), (3, 4, 32)), ids=str)
def test_what_a_router_gets_or_how_it_runs_does_not_reach_the_experts(device, monkeypatch, shape, router):
    layer = moxie.nn.MoE(32, 64, 4, 2, device=device, dtype=torch.bfloat16)
    if router in ("frozen", "other"):
        layer.router = (FrozenRouter(32, 4, 2) if router == "frozen" else OtherRouter()).to(device)
    else:
        hook = {"detached": torch.detach, "zeros": torch.zeros_like, "f32": torch.Tensor.float}[router]
        layer.router.register_forward_pre_hook(lambda _, args: (hook(args[0]),))
    x = torch.randn(shape, device=device, dtype=torch.bfloat16)

    def run():
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.float().square().sum().backward()
        return [y.detach(), leaf.grad]

    got = run()
    assert got[0].dtype == torch.bfloat16 and got[0].any() and got[1].any()
    monkeypatch.setattr(moxie.nn.Router, "joins_gradients", False)
    assert_same_bytes(run(), got)


def test_x_without_gradient_gets_none_from_the_experts():
    layer = moxie.nn.MoE(32, 64, 4, 2)
    tokens = []
    layer.experts.register_forward_pre_hook(lambda _, args: tokens.append(args[0].requires_grad))
    layer(torch.randn(6, 32)).sum().backward()
    layer(torch.randn(6, 32).requires_grad_()).sum().backward()
    assert tokens == [False, True]


def test_the_loss_of_a_router_without_losses_is_zero():
    routing = moxie.nn.Router(16, 4, 2)(torch.randn(5, 16))
    assert routing.loss.item() == 0 and routing.loss.shape == () and not routing.loss.requires_grad


@pytest.mark.parametrize("with_bias", (False, True))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("tokens, experts, k", SHAPES)
def test_experts_weights_and_gradients_are_those_of_double(device, tokens, experts, k, options, with_bias):
    logits, bias = make(tokens, experts, device, with_bias)
    logits.requires_grad_()
    weights, ids, counts = ops._select_experts(logits, bias, k, **options)
    expected_ids, expected = reference(logits, bias, k, **options)
    assert torch.equal(ids.long(), expected_ids)
    assert torch.equal(counts, torch.bincount(expected_ids.flatten(), minlength=experts))
    # The scores, their sum (added up in f64) and the weight are each rounded to f32: at most 3 * 2^-24 in all.
    torch.testing.assert_close(weights.double(), expected, rtol=2**-22, atol=0)
    dweights = torch.randn_like(weights)
    (actual,) = torch.autograd.grad(weights, logits, dweights)
    (wanted,) = torch.autograd.grad(expected, logits, dweights.double())
    # Both compute in f64 and round to f32 at the end. Gradients are differences of products below 10, where f64 is off by 10 *
    # 2^-52.
    torch.testing.assert_close(actual, wanted, rtol=2**-23, atol=1e-13)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("tokens, experts, k", [shape for shape in SHAPES if shape[0]])
def test_a_tokens_bytes_do_not_depend_on_its_place(device, tokens, experts, k, options):
    logits, bias = make(tokens, experts, device, with_bias=True)
    order = torch.randperm(tokens, device=device)
    dweights = torch.randn(tokens, k, device=device)

    def run(logits, dweights):
        logits = logits.clone().requires_grad_()
        weights, ids, counts = ops._select_experts(logits, bias, k, **options)
        return ids, weights.detach(), torch.autograd.grad(weights, logits, dweights)[0], counts

    *by_token, counts = run(logits, dweights)
    *permuted, permuted_counts = run(logits[order], dweights[order])
    assert_same_bytes(permuted, [tensor[order] for tensor in by_token])
    assert torch.equal(counts, permuted_counts)
    assert_same_bytes(run(logits, dweights), [*by_token, counts])


def test_equal_scores_go_by_id_and_nan_comes_last(device):
    nan, infinity = float("nan"), float("inf")
    logits = torch.tensor([[1.0, 2, 1, 2], [nan, -infinity, nan, 3], [nan] * 4], device=device)
    weights, ids, counts = ops._select_experts(logits, None, 3, sigmoid=True)
    assert ids.tolist() == [[1, 3, 0], [3, 1, 0], [0, 1, 2]]
    assert counts.tolist() == [3, 3, 1, 2]
    assert weights[0].isfinite().all() and weights[1:].isnan().all()
    assert ops._select_experts(logits[:2], None, 2)[1].tolist() == [[1, 3], [0, 1]]


def test_strided_logits_and_gradients_are_the_dense_ones(device):
    logits = torch.randn(9, 40, device=device).t()[::2].requires_grad_()
    dense = logits.detach().contiguous().requires_grad_()
    grads = []
    for values in (logits, dense):
        weights, _, _ = ops._select_experts(values, None, 2, normalize=False)
        grads.append(torch.autograd.grad(weights.sum(), values)[0])
    assert_same_bytes(*grads)


def arguments(device: str):
    logits, bias = make(70, 9, device, with_bias=True)
    weights, ids, _ = ops._select_experts(logits, bias, 3)
    x = torch.randn(70, 24, device=device, dtype=torch.bfloat16)
    return logits, bias, ids, weights, x, torch.randn(9, 24, device=device)


def test_the_ops_obey_torch(device):
    logits, bias, ids, weights, x, weight = arguments(device)
    opcheck(ops._split_bf16.default, (logits, [0, 1, 2, 0, 0, 1]))
    opcheck(ops._gate_logits_backward.default, (logits, weight, x, torch.bfloat16))
    opcheck(ops._gate_logits_backward.default, (logits, weight, x, None))
    opcheck(ops._gate_logits_backward.default, (logits, weight, None, torch.bfloat16))
    opcheck(ops._gate_logits_backward.default, (logits, weight, x, torch.bfloat16, torch.randn_like(x)))
    load = torch.zeros(9, device=device, dtype=torch.int64)
    opcheck(ops._select_experts_once.default, (logits, bias, 3, True, True, 2.0, load))
    opcheck(ops._select_experts_once.default, (logits, None, 3, False, True, 1.0, None))
    opcheck(ops._select_experts_backward.default, (weights, logits, ids, True, True, 2.0))
    for bias_or_none in (bias, None):
        opcheck(ops._select_experts.default, (logits, bias_or_none, 3), {"sigmoid": True, "scale": 2.0})
        opcheck(ops._choose_experts.default, (x, weight, bias_or_none, 3, True, True, 2.0))
    # opcheck's test of the traced backward adds up all results in the dtype of the first, which integer ids do not allow. The
    # test of a compiled router covers the same.
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    for values in (logits, logits.double()):
        opcheck(ops._select_experts.default, (values.clone().requires_grad_(), bias, 3), test_utils=checks)
    for values in (x, x.double()):
        opcheck(ops._choose_experts.default, (values.clone().requires_grad_(), weight, bias, 3), test_utils=checks)


@pytest.mark.parametrize("score", ("softmax", "sigmoid"))
def test_a_compiled_router_gives_the_same_bytes(device, score):
    router = moxie.nn.Router(24, 9, 3, score=score, balance="bias", device=device, dtype=torch.bfloat16)
    compiled = torch.compile(router, fullgraph=True)
    for tokens in (40, 51):
        x = torch.randn(tokens, 24, device=device, dtype=torch.bfloat16, requires_grad=True)
        results = []
        for module in (router, compiled):
            router.reset_load_()
            routing = module(x)
            grads = torch.autograd.grad(routing.weights.square().sum(), [x, router.gate.weight])
            results.append([routing.ids, routing.weights.detach(), *grads, router.load.clone()])
        assert_same_bytes(*results)


def test_a_double_router_runs_in_inference_mode():
    router = moxie.nn.Router(24, 9, 3, dtype=torch.float64)
    x = torch.randn(5, 24, dtype=torch.float64)
    expected = router(x)
    with torch.inference_mode():
        routing = router(x)
    assert torch.equal(routing.ids, expected.ids) and torch.equal(routing.weights, expected.weights)


def test_three_terms_add_up_to_the_matrix(device):
    x = torch.randn(30, 12, device=device)
    terms = ops._split_bf16(x, [0, 1, 2, 0])
    assert terms.shape == (30, 48) and terms.dtype == torch.bfloat16
    first, second, third, again = terms.double().view(30, 4, 12).unbind(1)
    assert torch.equal(first + second + third, x.double()) and torch.equal(again, first)


@contextlib.contextmanager
def precision(tf32: bool, reduced: bool):
    backend = torch.backends.cuda.matmul
    before = backend.allow_tf32, backend.allow_bf16_reduced_precision_reduction
    backend.allow_tf32, backend.allow_bf16_reduced_precision_reduction = tf32, reduced
    try:
        yield
    finally:
        backend.allow_tf32, backend.allow_bf16_reduced_precision_reduction = before


X_AND_WEIGHT = [
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
]


@pytest.mark.parametrize("tf32", (False, True))
@pytest.mark.parametrize("of_x, of_weight", X_AND_WEIGHT, ids=str)
@pytest.mark.parametrize("tokens, dim, experts", [(300, 2048, 16), (70, 130, 5), (1000, 512, 128), (9, 7, 1)])
def test_logits_and_their_gradients_are_exact_to_f32_sums(device, tokens, dim, experts, of_x, of_weight, tf32):
    x = torch.randn(tokens, dim, device=device).to(of_x).requires_grad_()
    weight = (torch.randn(experts, dim, device=device) / dim**0.5).to(of_weight).requires_grad_()
    dlogits = torch.randn(tokens, experts, device=device)
    with precision(tf32, reduced=True):
        logits = moxie.gate_logits(x, weight)
        dx, dweight = torch.autograd.grad(logits, (x, weight), dlogits)
    assert logits.dtype == torch.float32 and dx.dtype == of_x and dweight.dtype == of_weight
    wide_x, wide_weight, wide_dlogits = x.detach().double(), weight.detach().double(), dlogits.double()
    products = {
        "logits": (logits, wide_x, wide_weight.t()),
        "dx": (dx, wide_dlogits, wide_weight),
        "dweight": (dweight, wide_dlogits.t(), wide_x),
    }
    for name, (actual, left, right) in products.items():
        exact, magnitudes = left @ right, left.abs() @ right.abs()
        # f32 sums of up to 2048 values of both signs are off by at most 2^-18 of the values' magnitudes; partial sums in TF32 or
        # bf16 would be off by 2^-11 or 2^-9. bf16 results are rounded once more.
        bound = 2**-18 * magnitudes + (exact.abs() * 2**-8 if actual.dtype == torch.bfloat16 else 0)
        assert ((actual.double() - exact).abs() <= bound).all(), name


def test_values_that_are_not_finite_stay_visible(device):
    x = torch.randn(6, 16, device=device, dtype=torch.bfloat16)
    weight = torch.randn(4, 16, device=device)
    weight[1, 3], weight[2, 5] = float("inf"), float("nan")
    logits = moxie.gate_logits(x, weight)
    assert logits[:, 0].isfinite().all() and logits[:, 3].isfinite().all()
    assert not logits[:, 1].isfinite().any() and logits[:, 2].isnan().all()


@pytest.mark.parametrize("needs_x, needs_weight", [(True, False), (False, True)])
def test_either_gradient_of_logits_can_be_asked_for_alone(device, needs_x, needs_weight):
    x = torch.randn(20, 16, device=device, dtype=torch.bfloat16)
    weight, dlogits = torch.randn(4, 16, device=device), torch.randn(20, 4, device=device)

    def grads(needs_x, needs_weight):
        leaves = [x.clone().requires_grad_(needs_x), weight.clone().requires_grad_(needs_weight)]
        moxie.gate_logits(*leaves).backward(dlogits)
        return [leaf.grad for leaf in leaves]

    both, one = grads(True, True), grads(needs_x, needs_weight)
    assert_same_bytes([grad for grad in one if grad is not None], both[:1] if needs_x else both[1:])


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: ops._select_experts(torch.zeros(3, 4), None, 5), ValueError, "select_experts: k must be 1 to the 4 experts"),
        (lambda: ops._select_experts(torch.zeros(3, 4), torch.zeros(3), 2), ValueError, "bias must be \\[4\\], got \\[3\\]"),
        (lambda: ops._select_experts(torch.zeros(3, 4).bfloat16(), None, 2), TypeError, "logits must be torch.float32, got .*bf"),
        (lambda: ops._select_experts(torch.zeros(3, 2000), None, 2), ValueError, "there must be 1 to 1024 experts, got 2000"),
        (
            lambda: ops._select_experts_once(torch.zeros(3, 4), None, 2, False, True, 1.0, torch.zeros(3, dtype=torch.int64)),
            ValueError,
            "select_experts: load must be \\[4\\], got \\[3\\]",
        ),
        (
            lambda: ops._select_experts_once(torch.zeros(3, 4), None, 2, False, True, 1.0, torch.zeros(4)),
            TypeError,
            "select_experts: load must be torch.int64, got torch.float32",
        ),
        (
            lambda: ops._gate_logits_backward(torch.zeros(3, 4), torch.zeros(4, 5), None, torch.bfloat16, torch.zeros(3, 5)),
            TypeError,
            "gate_logits: the gradient to add must be torch.bfloat16, got torch.float32",
        ),
        (lambda: ops._split_bf16(torch.zeros(3, 4), [3]), ValueError, "split_bf16: terms must be 0 to 2, got 3"),
        (lambda: ops._split_bf16(torch.zeros(3, 4).bfloat16(), [0]), TypeError, "split_bf16: x must be torch.float32"),
    ],
)
def test_a_bad_call_says_the_op_the_rule_and_the_value(call, error, message):
    with pytest.raises(error, match=message):
        call()
