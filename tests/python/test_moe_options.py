"""MoE modules with biases, other activations and weight layouts, and main gradients."""

import copy
import itertools
import pickle

import pytest
import torch
import torch._dynamo

import moxie
import moxie.nn
from support import assert_same_bytes

OPTIONS = {"activation": "clamped_swiglu", "bias": True}
LAYOUTS = list(itertools.product(("concatenated", "interleaved"), (False, True)))


def layer_of(device: str, **options):
    torch.manual_seed(1)
    return moxie.nn.MoE(64, 96, 4, 2, shared_hidden_dim=32, device=device, **OPTIONS, **options)


def give_weights(layer, stored) -> None:
    """Copies the weights of `layer` into `stored`, which keeps them in another layout."""
    stored.router.load_state_dict(layer.router.state_dict())
    for own, given in ((stored.experts, layer.experts), (stored.shared.experts, layer.shared.experts)):
        own.load_weights_(w13=given.w13, w2=given.w2, b13=given.b13, b2=given.b2)


def in_turn(rows):
    gate, up = rows.chunk(2, 1)
    return torch.stack([gate, up], 2).flatten(1, 2)


def step(layer, x):
    layer.zero_grad()
    y = layer(x)
    y.square().mean().backward()
    return y.detach()


@pytest.mark.parametrize("cached", (False, True), ids=("", "cached"))
@pytest.mark.parametrize("layout, transposed", LAYOUTS)
def test_a_layer_stored_otherwise_gives_the_same_bytes(layout, transposed, cached, device):
    x = torch.randn(30, 64, device=device)
    layer = layer_of(device)
    stored = layer_of(device, w13_layout=layout, transposed=transposed, weight_cache=cached)
    give_weights(layer, stored)
    assert_same_bytes(step(stored, x), step(layer, x))
    for own, given in ((stored.experts, layer.experts), (stored.shared.experts, layer.shared.experts)):
        assert own.w13.grad.is_contiguous() and own.w13.shape == (
            (*own.w13.shape[:1], 64, own.b13.shape[1]) if transposed else given.w13.shape
        )
        as_taken = (lambda w: w.mT) if transposed else (lambda w: w)
        ordered = in_turn if layout == "interleaved" else (lambda w: w)
        assert_same_bytes(as_taken(own.w13.grad).contiguous(), ordered(given.w13.grad))
        assert_same_bytes(as_taken(own.w2.grad).contiguous(), given.w2.grad)
        assert_same_bytes(own.b13.grad, ordered(given.b13.grad))
        assert_same_bytes(own.b2.grad, given.b2.grad)


@pytest.mark.parametrize("layout, transposed", LAYOUTS)
def test_main_gradients_add_up_what_grad_would_have(layout, transposed, device):
    x = torch.randn(30, 64, device=device)
    layer = layer_of(device, w13_layout=layout, transposed=transposed)
    fused = layer_of(device, w13_layout=layout, transposed=transposed, main_grad=True)
    fused.load_state_dict(layer.state_dict())
    step(layer, x)
    pairs = [
        (getattr(o.experts, n), getattr(p.experts, n))
        for o, p in ((fused, layer), (fused.shared, layer.shared))
        for n in ("w13", "w2")
    ]
    for own, _ in pairs:
        own.main_grad = torch.zeros_like(own, dtype=torch.float32)
    step(fused, x)
    for own, given in pairs:
        assert own.grad is None
        assert_same_bytes(own.main_grad, given.grad)
    assert fused.experts.b13.grad is not None and fused.router.gate.weight.grad is not None
    step(fused, x)
    for own, given in pairs:
        assert_same_bytes(own.main_grad, given.grad * 2)


def test_a_module_without_its_main_gradients_says_so(device):
    layer = layer_of(device, main_grad=True)
    with pytest.raises(ValueError, match=r"main_grad=True needs w13.main_grad, f32 \[4, 192, 64\], got none"):
        layer(torch.randn(3, 64, device=device))
    with torch.no_grad():
        layer(torch.randn(3, 64, device=device))  # nothing is to be added


def test_compiled_layers_add_to_main_gradients_too(device):
    torch._dynamo.reset()
    x = torch.randn(30, 64, device=device)
    layer = layer_of(device, main_grad=True, w13_layout="interleaved", transposed=True)
    weights = [layer.experts.w13, layer.experts.w2, layer.shared.experts.w13, layer.shared.experts.w2]
    sums = []
    for function in (layer, torch.compile(layer)):
        for weight in weights:
            weight.main_grad = torch.zeros_like(weight)
        function(x).square().mean().backward()
        sums.append([weight.main_grad for weight in weights])
    for eager, compiled in zip(*sums):
        assert eager.abs().max() > 0
        assert_same_bytes(compiled, eager)


def test_copies_and_pickles_keep_the_options(device):
    x = torch.randn(9, 64, device=device)
    layer = layer_of(device, w13_layout="interleaved", transposed=True, weight_cache=True)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same_bytes(other(x), layer(x))


def test_a_pickle_from_before_the_options_is_a_plain_layer(device):
    experts = moxie.nn.GroupedExperts(64, 96, 2, device=device)
    state = experts.__getstate__() if hasattr(experts, "__getstate__") else experts.__dict__
    state = {k: v for k, v in state.items() if k not in ("activation", "w13_layout", "transposed", "main_grad")}
    state["_parameters"] = {k: v for k, v in state["_parameters"].items() if k not in ("b13", "b2")}
    old = moxie.nn.GroupedExperts.__new__(moxie.nn.GroupedExperts)
    old.__setstate__(state)
    x, offs = torch.randn(5, 64, device=device), torch.tensor([2, 5], dtype=torch.int32, device=device)
    assert_same_bytes(old(x, offs), experts(x, offs))


def test_statistics_do_not_change_results(device):
    x = torch.randn(30, 64, device=device)
    layer = layer_of(device, w13_layout="interleaved", transposed=True)
    plain = step(layer, x), layer.experts.w13.grad
    layer.experts.collect_stats = True
    assert_same_bytes(step(layer, x), plain[0])
    assert_same_bytes(layer.experts.w13.grad, plain[1])
    assert moxie.sqnr(layer.experts.stats).min() > 20


def test_wrong_options_and_weights_are_refused():
    with pytest.raises(ValueError, match="GroupedExperts: activation must be one of swiglu, clamped_swiglu, got 'gelu'"):
        moxie.nn.GroupedExperts(8, 6, 2, activation="gelu")
    with pytest.raises(ValueError, match="GroupedExperts: w13_layout must be one of concatenated, interleaved, got 'rows'"):
        moxie.nn.MoE(8, 6, 2, 1, w13_layout="rows")
    with pytest.raises(ValueError, match="these experts have no biases, got b2"):
        moxie.nn.GroupedExperts(8, 6, 2).load_weights_(b2=torch.zeros(2, 8))
    with pytest.raises(ValueError, match=r"b13 must be \[2, 12\], got \[12\]"):
        moxie.nn.GroupedExperts(8, 6, 2, bias=True).load_weights_(b13=torch.zeros(12))


@pytest.mark.parametrize("cached, asked", [("concatenated", "interleaved"), ("interleaved", "concatenated")])
def test_a_weight_cache_of_another_layout_is_refused(cached, asked, device):
    w13, w2 = torch.randn(2, 128, 64, device=device), torch.randn(2, 64, 64, device=device)
    cache = moxie.WeightCache(w13, w13_layout=cached)
    x, offs = torch.randn(5, 64, device=device), torch.tensor([2, 5], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=f"expert_mlp: the weight cache was made for the layout {cached}, got {asked}"):
        moxie.expert_mlp(x, w13, w2, offs, quantized_w13=cache, w13_layout=asked)


def test_a_product_refuses_the_cache_of_interleaved_weights(device):
    w = torch.randn(2, 128, 64, device=device)
    cache = moxie.WeightCache(w, w13_layout="interleaved")
    with pytest.raises(ValueError, match="grouped_mm: the weight cache was made for the layout interleaved"):
        moxie.grouped_mm(torch.randn(5, 64, device=device), w, torch.tensor([2, 5], device=device).int(), quantized_w=cache)
