"""Recipes with keep_w=false: forward does not keep the form of w that dgrad reads; backward makes it from w. Results have the
same bytes."""

import pytest
import torch
import torch._dynamo
from torch.utils.checkpoint import checkpoint

import moxie
import moxie.nn
from support import assert_same_bytes, random_values, sizes_to_offs
from test_moe_fused import Spy, storages
from test_moe_weighted import problem_of, step, weighted

QUANTIZED = [name for name in moxie.recipe_names() if name != "bf16"]
SIZES = [37, 0, 128, 20]  # of groups
RECIPE = "mxfp8_rceil_128"
NAMES = ("y", "dx", "dw")


def without(recipe: str) -> str:
    return f"{recipe}:keep_w=false"


def problem(device: str, dtype=torch.bfloat16, groups: bool = True):
    offs = sizes_to_offs(SIZES, device) if groups else None
    rows = sum(SIZES) + 3 if groups else 50
    x = random_values(rows, 160, device=device).to(dtype)
    w = torch.randn(len(SIZES) if groups else 1, 96, 160, device=device).to(dtype)
    return x, w, offs, torch.randn(rows, 96, device=device).to(dtype)


def gradients(recipe: str, of, needs=(True, True), **options):
    x, w, offs, dy = of
    x, w = x.detach().requires_grad_(needs[0]), w.detach().requires_grad_(needs[1])
    y = moxie.grouped_mm(x, w, offs, recipe=recipe, **options)
    y.backward(dy)
    return y.detach(), x.grad, w.grad


def kept_by(call, *known) -> dict[int, int]:
    """Returns the sizes of the storages that backward of call() reads, those of `known` tensors excepted, by address."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        call()
    kept = storages(saved)
    for tensor in known:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    return kept


# ---- results -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("recipe", moxie.recipe_names())
def test_a_product_and_its_gradients_have_the_same_bytes(recipe, dtype, device):
    for groups in (True, False):
        of = problem(device, dtype, groups)
        for needs in ((True, True), (True, False), (False, True)):
            for name, a, b in zip(NAMES, gradients(without(recipe), of, needs), gradients(recipe, of, needs), strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    assert_same_bytes(a, b, f"{name}, groups {groups}, needs {needs}")


@pytest.mark.parametrize("recipe", moxie.recipe_names())
def test_a_layer_and_its_gradients_have_the_same_bytes(recipe, device):
    of = problem_of(device)
    for needs in ((True,) * 4, (True, False, False, False), (False, True, False, True)):
        for keep in ("h", "h_fp8"):
            actual = step(weighted, of, needs, recipe=without(recipe), keep=keep)
            expected = step(weighted, of, needs, recipe=recipe, keep=keep)
            for a, b in zip(actual, expected, strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    assert_same_bytes(a, b, f"needs {needs}, keep {keep}")


@pytest.mark.parametrize("layout", ("concatenated", "interleaved"))
@pytest.mark.parametrize("transposed", (False, True), ids=("in rows", "transposed"))
@pytest.mark.parametrize("recipe", ("bf16", "mxfp8_rceil", "mxfp8_rceil_128"))
def test_weights_may_be_stored_in_any_layout(recipe, transposed, layout, device):
    def gradients_of(text):
        torch.manual_seed(0)
        options = {"w13_layout": layout, "transposed": transposed, "bias": True, "activation": "clamped_swiglu"}
        layer = moxie.nn.MoE(64, 96, 4, 2, recipe=text, device=device, dtype=torch.bfloat16, **options)
        x = random_values(30, 64, device=device).requires_grad_()
        layer(x).square().sum().backward()
        return [x.grad, *(p.grad for p in layer.parameters())]

    for a, b in zip(gradients_of(without(recipe)), gradients_of(recipe), strict=True):
        assert_same_bytes(a, b)


def test_a_main_gradient_gets_the_same_sum(device):
    of = problem(device)
    sums = [torch.ones(of[1].shape, device=device) for _ in range(2)]
    for text, total in zip(("mxfp8_rceil_128", without("mxfp8_rceil_128")), sums):
        gradients(text, of, main_grad=total)
    assert_same_bytes(*sums)


def test_a_quantized_x_gives_the_same_bytes(device):
    x, w, offs, dy = problem(device)
    made = []
    for text in ("mxfp8_rceil", without("mxfp8_rceil")):
        leaves = [x.detach().requires_grad_(), w.detach().requires_grad_()]
        y = moxie.grouped_mm(moxie.MXTensor.to_mx(leaves[0], block="1x32"), leaves[1], offs, recipe=text)
        made.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
    assert_same_bytes(*made)


def test_backward_twice_and_checkpointing_give_the_same_bytes(device):
    x, w, offs, dy = problem(device)
    leaves = [x.requires_grad_(), w.requires_grad_()]
    call = lambda x, w: moxie.grouped_mm(x, w, offs, recipe=without("mxfp8_rceil_128"))
    y = call(*leaves)
    first = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    assert_same_bytes(torch.autograd.grad(y, leaves, dy), first)
    again = checkpoint(call, *leaves, use_reentrant=False)
    assert_same_bytes(torch.autograd.grad(again, leaves, dy), first)


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_compiled_calls_give_the_same_bytes(backend, device):
    of = problem_of(device)
    expected = step(weighted, of, recipe=without("mxfp8_rceil_128"))
    torch._dynamo.reset()
    compiled = torch.compile(weighted, backend=backend, fullgraph=True)
    for a, b in zip(step(compiled, of, recipe=without("mxfp8_rceil_128")), expected, strict=True):
        assert_same_bytes(a, b)


# ---- what is kept ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_nothing_of_w_is_kept_but_w(recipe, device):
    x, w, offs, _ = problem(device)
    w.requires_grad_(False)  # so that nothing of x is kept
    x.requires_grad_()
    with_form = kept_by(lambda: moxie.grouped_mm(x, w, offs, recipe=recipe), w, offs)
    assert sum(with_form.values()) >= w.numel()
    assert kept_by(lambda: moxie.grouped_mm(x, w, offs, recipe=without(recipe)), w, offs) == {}


@pytest.mark.parametrize("layout", ("concatenated", "interleaved"))
@pytest.mark.parametrize("recipe", moxie.recipe_names())
def test_a_layer_keeps_h_and_little_else(recipe, layout, device):
    tensors, _, route = problem_of(device)
    leaves = [leaf.requires_grad_() for leaf in tensors]
    call = lambda: weighted(*leaves, route, recipe=without(recipe), w13_layout=layout)
    of_h = leaves[0].shape[0] * route[3] * leaves[1].shape[1] * 2
    assert sum(kept_by(call, *leaves, *route[:3]).values()) == of_h


def test_a_copy_of_f32_weights_in_bf16_is_not_kept(device):
    x, w, offs, _ = problem(device)
    w = w.float()
    x.requires_grad_()
    copy = kept_by(lambda: moxie.grouped_mm(x, w, offs, recipe="bf16"), w, offs)
    assert sum(copy.values()) == 2 * w.numel()
    assert kept_by(lambda: moxie.grouped_mm(x, w, offs, recipe=without("bf16")), w, offs) == {}


def test_a_weight_cache_is_used_and_kept_as_before(device):
    x, w, offs, dy = problem(device)
    recipe = without("mxfp8_rceil_128")
    for made_for in (recipe, "mxfp8_rceil_128"):
        cache = moxie.WeightCache(w, recipe=made_for)
        with Spy() as spy:
            cached = gradients(recipe, (x, w, offs, dy), quantized_w=cache)
        assert len([name for name in spy.names if "quantize" in name]) == 2, "x and dy"
        for a, b in zip(cached, gradients(recipe, (x, w, offs, dy)), strict=True):
            assert_same_bytes(a, b)
    with pytest.raises(ValueError, match="the weight cache was made for the recipe mxfp8_rceil_128, got mxfp8_rceil:keep_w"):
        moxie.grouped_mm(x, w, offs, recipe=without("mxfp8_rceil"), quantized_w=cache)


def test_a_weight_that_is_made_for_the_call_is_kept_in_fp8_alone(device):
    """Such as the sum of a weight and an adapter's update. It has more bytes than its form for dgrad."""
    x, w, offs, dy = problem(device)
    delta = torch.zeros_like(w).requires_grad_()
    x.requires_grad_()
    kept = [kept_by(lambda text=text: moxie.grouped_mm(x, w + delta, offs, recipe=text)) for text in (RECIPE, without(RECIPE))]
    assert sorted(kept[0].values()) == sorted(kept[1].values())
    y = moxie.grouped_mm(x, w + delta, offs, recipe=without(RECIPE))
    assert_same_bytes(torch.autograd.grad(y, (x, delta), dy)[0], gradients(RECIPE, (x, w, offs, dy))[1])


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_a_compiled_layer_keeps_nothing_of_its_weights(backend, device):
    """Of parameters: other inputs of a graph count as activations, and partitioners keep what is smaller."""
    kept = []
    for text in (RECIPE, without(RECIPE)):
        torch._dynamo.reset()
        layer = moxie.nn.MoE(64, 96, 4, 2, recipe=text, device=device, dtype=torch.bfloat16)
        x = random_values(30, 64, device=device).requires_grad_()
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            torch.compile(layer, backend=backend)(x)
        kept.append(sum(t.nbytes for t in saved if t.dtype == torch.float8_e4m3fn))
    assert kept == [4 * 3 * 96 * 64, 0]


def test_explain_counts_no_bytes_of_w():
    sizes = {"n": 256, "k": 512, "rows": 4096, "groups": 4, "device": "cpu"}
    assert moxie.explain("mxfp8_rceil_128", **sizes).w_bytes >= 4 * 256 * 512
    assert moxie.explain(without("mxfp8_rceil_128"), **sizes).w_bytes == 0


def test_a_weight_that_changed_since_forward_is_an_error(device):
    """Backward would quantize the new weight. torch finds that out, as for any product."""
    x, w, offs, dy = problem(device)
    w.requires_grad_()
    y = moxie.grouped_mm(x.requires_grad_(), w, offs, recipe=without("mxfp8_rceil_128"))
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


@pytest.mark.parametrize("recipe", [*moxie.recipe_names(), *(without(name) for name in moxie.recipe_names())])
def test_a_weight_whose_memory_was_freed_is_an_error(recipe):
    """FSDP2 frees weights after forward. If it does not know of the backward, it does not gather them again."""
    x, w, offs, dy = problem("cpu", torch.float32)
    x.requires_grad_()
    y = moxie.grouped_mm(x, w, offs, recipe=recipe)
    w.untyped_storage().resize_(0)
    if "keep_w" in recipe:
        with pytest.raises((RuntimeError, ValueError), match="has no memory|not allocated yet"):
            y.backward(dy)
    with pytest.raises((RuntimeError, ValueError), match="has no memory|not allocated yet"):
        moxie.grouped_mm(x, w, offs, recipe=recipe)


def test_a_conversion_takes_it(device):
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 64)).to(device)
    report = moxie.quantize_(model, without("mxfp8_rceil_128"))
    assert len(report.converted) == 2 and "keep_w=false" in model[0].conversion.recipe
    x = torch.randn(8, 64, device=device)
    assert kept_by(lambda: model(x), x, *model.parameters()), "x is kept, in FP8"
    in_fp8 = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: in_fp8.append(t) or t, lambda t: t):
        model(x).sum().backward()
    shapes = {tuple(t.shape) for t in in_fp8 if t.dtype == torch.float8_e4m3fn}
    assert (1, 64, 96) not in shapes and (1, 96, 64) not in shapes
