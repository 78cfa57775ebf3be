"""expert_mlp gives the bytes of grouped_mm, swiglu and grouped_mm in turn, forward and backward. Also tests swiglu itself."""

import functools

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import moxie
from support import assert_same_bytes, random_values, sizes_to_offs

RECIPES = moxie.recipe_names()
SIZES = [37, 0, 64, 5]
DIM, HIDDEN = 96, 40


def inputs(device: str, dtype=torch.bfloat16, sizes=None, tail: int = 9):
    """x, w13, w2, offs, dy."""
    sizes = SIZES if sizes is None else sizes
    rows, groups = sum(sizes) + tail, len(sizes)
    normal = lambda *shape: torch.randn(shape).to(dtype).to(device)
    return (
        normal(rows, DIM),
        normal(groups, 2 * HIDDEN, DIM) * DIM**-0.5,
        normal(groups, DIM, HIDDEN) * HIDDEN**-0.5,
        sizes_to_offs(sizes, device),
        normal(rows, DIM),
    )


def chain(
    x, w13, w2, offs, *, recipe="mxfp8_rceil_128", quantized_w13=None, quantized_w2=None, main_grad13=None, main_grad2=None
):
    h = moxie.grouped_mm(x, w13, offs, recipe=recipe, quantized_w=quantized_w13, main_grad=main_grad13)
    return moxie.grouped_mm(moxie.swiglu(h), w2, offs, recipe=recipe, quantized_w=quantized_w2, main_grad=main_grad2)


def step(function, tensors, needs=(True, True, True), **kwargs):
    *leaves, offs, dy = tensors
    leaves = [leaf.detach().requires_grad_(need) for leaf, need in zip(leaves, needs)]
    y = function(*leaves, offs, **kwargs)
    y.backward(dy.to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def assert_same(actual, expected, what: str = "") -> None:
    for name, a, b in zip(("y", "dx", "dw13", "dw2"), actual, expected, strict=True):
        assert (a is None) == (b is None), f"{what} {name}"
        if a is not None:
            assert_same_bytes(a, b, f"{what} {name}")


# ---- the chain -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_node_gives_the_bytes_of_the_chain(recipe, dtype, device):
    for sizes, tail in ((SIZES, 9), ([2000, 1900], 0)):
        tensors = inputs(device, dtype, sizes, tail)
        assert_same(step(moxie.expert_mlp, tensors, recipe=recipe), step(chain, tensors, recipe=recipe), str(sizes))


@pytest.mark.parametrize("out", ("bfloat16", "float32"))
def test_the_dtype_of_a_recipe_holds_for_the_node_too(out, device):
    for dtype in (torch.bfloat16, torch.float32):
        tensors, recipe = inputs(device, dtype), f"mxfp8_rceil:out={out}"
        results = step(moxie.expert_mlp, tensors, recipe=recipe)
        assert [t.dtype for t in results] == [getattr(torch, out), dtype, dtype, dtype]
        assert_same(results, step(chain, tensors, recipe=recipe))


@pytest.mark.parametrize(
    "needs",
    (
        (True, False, False),
        (False, True, False),
        (False, False, True),
        (True, False, True),
        (False, True, True),
        (True, True, False),
    ),
    ids=str,
)
def test_only_the_gradients_that_are_needed_are_computed(needs, device):
    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "moxie":
                self.names.append(func._schema.name.split("::")[1])
            return func(*args, **(kwargs or {}))

    Spy.names = []
    tensors = inputs(device)
    with Spy():
        actual = step(moxie.expert_mlp, tensors, needs)
    x, w13, w2 = needs
    assert Spy.names.count("grouped_dgrad") == (x or w13) + x
    assert Spy.names.count("grouped_wgrad") == w13 + w2
    assert Spy.names.count("_swiglu_backward_quantize") == (x or w13)
    assert_same(actual, step(chain, tensors, needs))


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "bf16"])
def test_caches_of_both_weights_give_the_same_bytes(recipe, device):
    tensors = inputs(device)
    caches = {
        "quantized_w13": moxie.WeightCache(tensors[1], recipe=recipe),
        "quantized_w2": moxie.WeightCache(tensors[2], recipe=recipe),
    }
    expected = step(chain, tensors, recipe=recipe)
    assert_same(step(moxie.expert_mlp, tensors, recipe=recipe, **caches), expected)
    assert_same(step(chain, tensors, recipe=recipe, **caches), expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_both_main_gradients_grow_as_those_of_the_chain(recipe, device):
    tensors = inputs(device, torch.float32)
    zeros = lambda: {"main_grad13": torch.zeros_like(tensors[1]), "main_grad2": torch.zeros_like(tensors[2])}
    of_node, of_chain = zeros(), zeros()
    for _ in range(2):
        actual = step(moxie.expert_mlp, tensors, recipe=recipe, **of_node)
        assert_same(actual, step(chain, tensors, recipe=recipe, **of_chain))
        assert actual[2] is None and actual[3] is None
    assert_same_bytes(list(of_node.values()), list(of_chain.values()))
    single = step(chain, tensors, recipe=recipe)
    torch.testing.assert_close(of_node["main_grad13"], 2 * single[2], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(of_node["main_grad2"], 2 * single[3], rtol=1e-4, atol=1e-4)


def test_weights_used_twice_add_up_in_one_main_gradient(device):
    x, w13, w2, offs, dy = inputs(device, torch.float32)
    single = step(chain, (x, w13, w2, offs, dy))
    grads = {"main_grad13": torch.zeros_like(w13), "main_grad2": torch.zeros_like(w2)}
    w13, w2 = w13.requires_grad_(), w2.requires_grad_()
    ys = [moxie.expert_mlp(x, w13, w2, offs, **grads) for _ in range(2)]
    for y in ys:
        y.backward(dy)
    torch.testing.assert_close(grads["main_grad13"], 2 * single[2], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grads["main_grad2"], 2 * single[3], rtol=1e-4, atol=1e-4)


def test_garbage_past_the_groups_changes_nothing(device):
    tensors = inputs(device)
    expected = step(moxie.expert_mlp, tensors)
    x, dy = tensors[0].clone(), tensors[4].clone()
    x[106:], dy[106:] = float("nan"), float("inf")
    actual = step(moxie.expert_mlp, (x, *tensors[1:4], dy))
    assert_same(actual, expected)
    assert not actual[0][106:].any() and not actual[1][106:].any()
    assert not actual[2][1].any() and not actual[3][1].any(), "an expert without tokens"


def test_inference_mode_and_no_offs(device):
    x, w13, w2, offs, _ = inputs(device)
    with torch.inference_mode():
        assert_same_bytes(moxie.expert_mlp(x, w13, w2, offs), chain(x, w13, w2, offs))
        assert_same_bytes(moxie.expert_mlp(x, w13[:1], w2[:1]), chain(x, w13[:1], w2[:1], None))


def test_a_second_derivative_is_refused(device):
    x, w13, w2, offs, _ = inputs(device)
    y = moxie.expert_mlp(x.requires_grad_(), w13, w2, offs)
    with pytest.raises(RuntimeError, match="expert_mlp: a second derivative is not implemented"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


# ---- with torch.compile, checkpointing and autocast ------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_the_node_compiles_without_a_recompile_per_step(backend, device):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    function = torch.compile(lambda *args: moxie.expert_mlp(*args), backend=counter, fullgraph=True)
    for rows in (50, 77, 300, 41):
        tensors = inputs(device, torch.float32, [5, 0, 33, rows - 38])
        assert_same(step(function, tensors), step(chain, tensors), f"{rows} rows")
    assert counter.frame_count <= 2


def test_the_node_compiles_with_main_gradients(device):
    torch._dynamo.reset()
    function = torch.compile(lambda *args, **kwargs: moxie.expert_mlp(*args, **kwargs), backend="aot_eager", fullgraph=True)
    tensors = inputs(device, torch.float32)
    single = step(chain, tensors)
    grads = {"main_grad13": torch.zeros_like(tensors[1]), "main_grad2": torch.zeros_like(tensors[2])}
    for _ in range(2):
        assert step(function, tensors, **grads)[2:] == [None, None]
    torch.testing.assert_close(grads["main_grad13"], 2 * single[2], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grads["main_grad2"], 2 * single[3], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("selective", (False, True))
def test_checkpointing_gives_the_same_bytes(selective, device):
    tensors, kwargs = inputs(device), {}
    if selective:
        kept = [torch.ops.moxie.grouped_mm.quantized]
        kwargs["context_fn"] = functools.partial(create_selective_checkpoint_contexts, kept)
    function = lambda *args: checkpoint(moxie.expert_mlp, *args, use_reentrant=False, **kwargs)
    assert_same(step(function, tensors), step(chain, tensors))


def test_autocast_casts_what_it_casts_in_the_chain(device):
    tensors = inputs(device, torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        actual, expected = step(moxie.expert_mlp, tensors), step(chain, tensors)
    assert [t.dtype for t in actual] == [torch.bfloat16] + [torch.float32] * 3
    assert_same(actual, expected)


# ---- errors ----------------------------------------------------------------------------------------------------------------


X, W13, W2, OFFS, _ = inputs("cpu")
BAD_CALLS = [
    ((X[0], W13, W2, OFFS), {}, ValueError, "x must be [rows, k], got 1 dims"),
    ((X, W13[0], W2, OFFS), {}, ValueError, "must be [groups,", "got 2 dims"),
    ((X, W13, W2[0], OFFS), {}, ValueError, "w2 must be [groups, n, k], got 2 dims"),
    ((X, W13[:, :, :64], W2, OFFS), {}, ValueError, "96 columns", "64"),
    ((X, W13[:, :79], W2, OFFS), {}, ValueError, "w13 must be [groups, 2 * hidden_dim, dim]", "79"),
    ((X, W13, W2[:, :, :39], OFFS), {}, ValueError, "w2 must be [4, 96, 40], got [4, 96, 39]"),
    ((X, W13[:3], W2, OFFS), {}, ValueError, "3 matrices for 4 groups"),
    ((X, W13, W2[:3], OFFS), {}, ValueError, "w2 must be [4, 96, 40], got [3, 96, 40]"),
    ((X.half(), W13, W2, OFFS), {}, TypeError, "x must be torch.bfloat16 or torch.float32, got torch.float16"),
    ((X, W13.half(), W2, OFFS), {}, TypeError, "w13 must be torch.bfloat16 or torch.float32, got torch.float16"),
    ((X, W13, W2.double(), OFFS), {}, TypeError, "w2 must be torch.bfloat16 or torch.float32, got torch.float64"),
    ((X, W13, W2, OFFS.long()), {}, TypeError, "offs must be torch.int32, got torch.int64"),
    ((X, W13, W2.to("meta"), OFFS), {}, ValueError, "on one device, got w2 on meta beside cpu"),
    ((X, W13, W2, OFFS), {"quantized_w13": [W13]}, ValueError, "quantized_w13 must be the four tensors", "got 1"),
    ((X, W13, W2, OFFS), {"quantized_w2": [W2, W2]}, ValueError, "quantized_w2 must be the four tensors", "got 2"),
    ((X, W13, W2, OFFS), {"main_grad13": torch.zeros(3, 3)}, ValueError, "main_grad13 must be [4, 80, 96], got [3, 3]"),
    (
        (X, W13, W2, OFFS),
        {"main_grad13": torch.zeros_like(W13)},
        TypeError,
        "main_grad13 must be torch.float32, got torch.bfloat16",
    ),
    ((X, W13, W2, OFFS), {"main_grad2": torch.zeros(W13.shape)}, ValueError, "main_grad2 must be [4, 96, 40], got [4, 80, 96]"),
    (
        (X, W13, W2, OFFS),
        {"main_grad2": torch.zeros(W2.shape, requires_grad=True)},
        ValueError,
        "main_grad2 must not require grad",
    ),
]


@pytest.mark.parametrize(
    "args, kwargs, exception, parts", [pytest.param(*case[:3], case[3:], id=str(i)) for i, case in enumerate(BAD_CALLS)]
)
def test_a_bad_call_says_the_op_the_rule_and_the_value(args, kwargs, exception, parts):
    with pytest.raises(exception) as caught:
        moxie.expert_mlp(*args, **kwargs)
    message = str(caught.value)
    assert message.startswith("expert_mlp: "), message
    for part in parts:
        assert part in message, message


# ---- swiglu ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("shape", ((1, 2), (37, 80), (3, 1000), (0, 4), (5, 0)), ids=str)
def test_swiglu_is_silu_of_the_gate_times_up_rounded_once(shape, dtype, device):
    h = torch.randn(shape).to(dtype).to(device).requires_grad_()
    da = torch.randn(shape[0], shape[1] // 2).to(dtype).to(device)
    a = moxie.swiglu(h)
    a.backward(da)
    exact = h.detach().double().requires_grad_()
    gate, up = exact.chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    expected.backward(da.double())
    rtol = 2.0**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(a.double(), expected, rtol=rtol, atol=1e-6)
    torch.testing.assert_close(h.grad.double(), exact.grad, rtol=rtol, atol=1e-6)
    assert a.dtype == h.grad.dtype == dtype


def test_swiglu_of_extremes(device):
    """SwiGLU does not overflow, a large negative gate does not become NaN, and a NaN does not spread to other elements."""
    gate = torch.tensor([-1e30, -200.0, -0.0, 0.0, 200.0, 1e30, float("nan"), 1.0], device=device)
    up = torch.tensor([2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, float("nan")], device=device)
    h = torch.cat([gate, up])[None].requires_grad_()
    a = moxie.swiglu(h)
    assert a[0, :6].tolist() == [0.0, 0.0, 0.0, 0.0, 400.0, 2e30] or torch.allclose(
        a[0, :6], torch.tensor([0.0, 0.0, 0.0, 0.0, 400.0, 2e30], device=device)
    )
    assert a[0, 6:].isnan().all()
    a.sum().backward()
    assert h.grad[0, :6].isfinite().all() and h.grad[0, 8:14].isfinite().all()


def test_swiglu_takes_strided_inputs_and_gradients(device):
    h = random_values(37, 80, dtype=torch.float32, device=device).clamp(-20, 20)
    grads = []
    for leaf in (h.clone().requires_grad_(), h.T.contiguous().T.requires_grad_()):
        moxie.swiglu(leaf).sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(grads[0], grads[1])


@pytest.mark.parametrize(
    "h, exception, part",
    (
        (torch.zeros(4, 7), ValueError, "h must be [rows, 2 * hidden_dim], got 7 columns"),
        (torch.zeros(4), ValueError, "h must be [rows, 2 * hidden_dim], got 1 dims"),
        (torch.zeros(4, 8).half(), TypeError, "h must be torch.bfloat16 or torch.float32, got torch.float16"),
    ),
)
def test_a_bad_swiglu_says_the_rule_and_the_value(h, exception, part):
    with pytest.raises(exception) as caught:
        moxie.swiglu(h)
    assert str(caught.value).startswith("swiglu: ") and part in str(caught.value)
