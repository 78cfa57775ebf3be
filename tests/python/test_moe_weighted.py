"""expert_mlp with routing weights: y is the weighted sum of each token's rows, and the weights get a gradient."""

import functools

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import moxie
import moxie.nn
from support import assert_same_bytes
from test_moe_fused import DIM, EXPERTS, HIDDEN, RECIPES, ByStep, make, storages

OPS = torch.ops.moxie
NAMES = ("y", "dx", "dw13", "dw2", "dweights")


def weighted(x, w13, w2, weights, route, **kwargs):
    offs, slot_of, row_of, top_k = route
    return moxie.expert_mlp(x, w13, w2, offs, slot_of=slot_of, row_of=row_of, top_k=top_k, weights=weights, **kwargs)


def problem_of(device: str, dtype=torch.bfloat16, **sizes):
    """Makes a problem: (x, w13, w2, weights), dy, and the routing."""
    tensors, _, route = make(device, dtype, **sizes)
    tokens, top_k = tensors[0].shape[0], route[3]
    weights = torch.rand(tokens, top_k, dtype=torch.float64 if dtype == torch.float64 else torch.float32).to(device)
    return (*tensors, weights), torch.randn_like(tensors[0]), route


def step(function, problem, needs=(True,) * 4, **kwargs):
    tensors, dy, route = problem
    leaves = [leaf.detach().requires_grad_(need) for leaf, need in zip(tensors, needs)]
    y = function(*leaves, route, **kwargs)
    y.backward(dy.to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def assert_same(actual, expected, what="") -> None:
    for name, a, b in zip(NAMES, actual, expected, strict=True):
        assert (a is None) == (b is None), f"{what} {name}"
        if a is not None:
            assert_same_bytes(a, b, f"{what} {name}")


# ---- what it computes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("needs", ((True,) * 4, (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 1, 1, 0)), ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_any_gradients_are_those_of_the_steps(recipe, needs, device):
    problem = problem_of(device)
    expected = step(lambda *args, recipe: ByStep.apply(*args, recipe), problem, recipe=recipe)
    actual = step(weighted, problem, tuple(map(bool, needs)), recipe=recipe)
    for name, a, e, need in zip(NAMES, actual, expected, (True, *needs), strict=True):
        assert (a is not None) == bool(need), name
        if need:
            assert_same_bytes(a, e, name)


def test_in_f64_the_gradients_are_those_of_calculus(device):
    tensors, _, route = problem_of(device, torch.float64, tokens=7)
    leaves = [leaf.requires_grad_() for leaf in tensors]
    assert torch.autograd.gradcheck(lambda *t: weighted(*t, route, recipe="identity"), leaves)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_the_gradient_of_a_weight_is_the_product_of_da_and_a(dtype, device):
    torch.manual_seed(5)
    rows, width = 70, 200
    h, da = torch.randn(rows, 2 * width, device=device, dtype=dtype), torch.randn(rows, width, device=device, dtype=dtype)
    weights, slot_of = torch.rand(35, 2, device=device), torch.randperm(rows, device=device).int()
    dh, dweights = OPS._weighted_swiglu_backward(da, h, weights, slot_of)
    gate, up = h.double().chunk(2, 1)
    terms = da.double() * torch.nn.functional.silu(gate) * up
    by_row = dweights.flatten()[slot_of.long()].double()
    # In f32 each of the 200 terms has three roundings and an error of one or two ulps in the sigmoid, and their sum rounds again.
    # For bf16 inputs the sigmoid is accurate to 2^-20 only.
    bound = terms.abs().sum(1) * ((8 + width) * 2.0**-24 + (2.0**-20 if dtype == torch.bfloat16 else 0))
    assert ((by_row - terms.sum(1)).abs() <= bound).all()
    factor = weights.flatten()[slot_of.long()].double().unsqueeze(1)
    plain = OPS.swiglu_backward(da.float(), h.float()).double() * factor
    torch.testing.assert_close(dh.double(), plain, rtol=2.0**-7 if dtype == torch.bfloat16 else 2.0**-20, atol=1e-6)


@pytest.mark.parametrize("keep, most", (("h", 1.0), ("h_fp8", 0.51)))
def test_between_forward_and_backward_h_is_kept_and_little_else(keep, most, device):
    tensors, _, route = problem_of(device, tokens=3000)
    leaves = [leaf.requires_grad_() for leaf in tensors]
    for recipe in RECIPES:
        saved = []
        caches = {}
        if recipe != "bf16":
            caches = {
                "quantized_w13": moxie.WeightCache(leaves[1], recipe=recipe),
                "quantized_w2": moxie.WeightCache(leaves[2], recipe=recipe),
            }
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            weighted(*leaves, route, recipe=recipe, keep=keep, **caches)
        kept = storages(saved)
        for t in (*leaves, *route[:3], *(c for cache in caches.values() for c in cache.tensors)):
            kept.pop(t.untyped_storage().data_ptr(), None)
        of_h = 6000 * 2 * HIDDEN * 2
        assert sum(kept.values()) <= most * of_h + 1024, recipe


@pytest.mark.parametrize("recipe", ("mxfp8_rceil_128", "bf16"))
def test_h_in_fp8_changes_gradients_alone_and_little(recipe, device):
    problem = problem_of(device, tokens=400)
    exact, rounded = step(weighted, problem, recipe=recipe), step(weighted, problem, recipe=recipe, keep="h_fp8")
    assert_same_bytes(rounded[0], exact[0], "y")
    assert_same_bytes(step(weighted, problem, recipe=recipe, keep="h_fp8")[1], rounded[1], "dx, twice")
    for name, a, e in zip(NAMES[1:], rounded[1:], exact[1:]):
        noise = (a.double() - e.double()).norm() / e.double().norm()
        # e4m3 has 4 significant bits, so rounding h changes an element by at most 2^-4 of itself, by 2^-5.4 on average.
        assert 0 < noise < 2.0**-4, name


def test_backward_twice_through_a_kept_graph_gives_the_same_bytes(device):
    tensors, dy, route = problem_of(device)
    leaves = [leaf.requires_grad_() for leaf in tensors]
    y = weighted(*leaves, route)
    first = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    assert_same_bytes(torch.autograd.grad(y, leaves, dy), first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, leaves, dy)


class FailsAt(TorchDispatchMode):
    """Raises an error when the n-th op runs, as if memory had run out."""

    def __init__(self, n: int):
        super().__init__()
        self.left = n

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("no memory left")
        return func(*args, **(kwargs or {}))


def test_a_backward_that_failed_midway_is_refused_the_second_time(device):
    tensors, dy, route = problem_of(device)
    leaves = [leaf.requires_grad_() for leaf in tensors]
    expected = torch.autograd.grad(weighted(*leaves, route), leaves, dy)
    refused = 0
    for n in range(1, 9):
        y = weighted(*leaves, route)
        with pytest.raises(RuntimeError, match="no memory left"), FailsAt(n):
            torch.autograd.grad(y, leaves, dy)
        try:  # works if the first attempt failed before the node began, and is refused if it failed later
            assert_same_bytes(torch.autograd.grad(y, leaves, dy), expected)
        except RuntimeError as error:
            assert "expert_mlp: an earlier backward of this graph failed midway" in str(error)
            refused += 1
    assert refused > 0


def test_what_a_hook_holds_is_not_given_back(device):
    tensors, dy, route = problem_of(device)
    held = []
    leaves = [leaf.requires_grad_() for leaf in tensors]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        y = weighted(*leaves, route)
    before = [t.clone() for t in held]
    y.backward(dy)
    for t, b in zip(held, before, strict=True):
        assert_same_bytes(t, b)


# ---- with torch.compile, checkpointing and autocast ----------------------------------------------------------------------------


@pytest.mark.parametrize("selective", (False, True))
def test_checkpointing_gives_the_same_bytes(selective, device):
    kwargs = {}
    if selective:
        kwargs["context_fn"] = functools.partial(create_selective_checkpoint_contexts, [OPS.grouped_mm.quantized])
    problem = problem_of(device)
    function = lambda *args: checkpoint(weighted, *args, use_reentrant=False, **kwargs)
    assert_same(step(function, problem), step(weighted, problem))


@pytest.mark.parametrize("backend, keep", (("aot_eager", "h"), ("aot_eager", "h_fp8"), ("inductor", "h")))
def test_the_node_compiles_without_a_recompile_per_step(backend, keep, device):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    function = torch.compile(lambda *args: weighted(*args, keep=keep), backend=counter, fullgraph=True)
    for tokens in (50, 77, 300, 41):
        problem = problem_of(device, torch.float32, tokens=tokens)
        assert_same(step(function, problem), step(weighted, problem, keep=keep), f"{tokens} tokens")
    assert counter.frame_count <= 2


@pytest.mark.parametrize("keep", ("h", "h_fp8"))
def test_the_layer_hands_keep_to_its_experts(keep, device):
    layer = moxie.nn.MoE(DIM, HIDDEN, EXPERTS, 2, keep=keep, shared_hidden_dim=32, device=device, dtype=torch.bfloat16)
    assert layer.experts.keep == layer.shared.experts.keep == keep
    layer(torch.randn(9, DIM, device=device, dtype=torch.bfloat16)).sum().backward()
    assert layer.experts.w13.grad.isfinite().all()


# ---- errors --------------------------------------------------------------------------------------------------------------------


(X, W13, W2, WEIGHTS), _, ROUTE = problem_of("cpu")
BAD_CALLS = [
    (WEIGHTS.double(), {}, TypeError, "weights must be torch.float32, got torch.float64"),
    (WEIGHTS[1:], {}, ValueError, "weights must be [50, 2], got [49, 2]"),
    (WEIGHTS.flatten(), {}, ValueError, "weights must be [50, 2], got [100]"),
    (WEIGHTS.to("meta"), {}, ValueError, "got weights on meta beside cpu"),
    (WEIGHTS, {"keep": "all"}, ValueError, "keep must be 'h' or 'h_fp8', got 'all'"),
]


@pytest.mark.parametrize("weights, kwargs, exception, part", BAD_CALLS)
def test_a_bad_call_says_the_op_the_rule_and_the_value(weights, kwargs, exception, part):
    with pytest.raises(exception) as error:
        weighted(X, W13, W2, weights, ROUTE, **kwargs)
    assert str(error.value).startswith("expert_mlp: ") and part in str(error.value)


def test_weights_need_a_permutation():
    with pytest.raises(ValueError, match="expert_mlp: weights need slot_of and row_of"):
        moxie.expert_mlp(X, W13[:1], W2[:1], weights=WEIGHTS)
