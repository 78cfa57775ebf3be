"""The gradients of grouped_mm: their values, which of them are computed, what is kept for backward, and main gradients."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import moxie
from grouped_reference import Problem, assert_straight_through, gaussian, run
from support import assert_same_bytes, block_shape, random_values, sizes_to_offs

RECIPES = moxie.recipe_names()
QUANTIZED = [name for name in RECIPES if name != "bf16"]
RAGGED = [37, 0, 64, 5, 120]


# ---- derivatives, with nothing rounded -------------------------------------------------------------------------------------

# These tests run on the CPU only, because the GPU kernels do not take f64.


@pytest.mark.parametrize("bias", (None, "n", "gn"), ids=str)
@pytest.mark.parametrize("sizes, tail", (([4], 0), ([3, 0, 5, 1], 0), ([0, 3, 0, 2], 4), ([0, 0], 3)), ids=str)
def test_identity_passes_gradcheck_in_double(sizes, tail, bias):
    problem = gaussian(sizes, 3, 5, tail=tail, dtype=torch.float64, bias=bias)
    inputs = [t.requires_grad_() for t in (problem.x, problem.w, problem.bias) if t is not None]

    def function(x, w, bias=None):
        return moxie.grouped_mm(x, w, problem.offs, recipe="identity", bias=bias)

    assert torch.autograd.gradcheck(function, inputs)


def test_identity_passes_gradcheck_without_offs_and_for_strided_inputs():
    x = torch.randn(5, 4, dtype=torch.float64).T.requires_grad_()
    w = torch.randn(1, 5, 3, dtype=torch.float64).mT.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: moxie.grouped_mm(x, w, recipe="identity"), (x, w))


def test_the_gradient_of_a_main_gradient_passes_in_double():
    problem = gaussian([3, 0, 2], 3, 5, tail=1, dtype=torch.float64)
    expected = run(problem, "identity").dw
    main_grad = torch.ones_like(problem.w)
    run(problem, "identity", main_grad=main_grad)
    torch.testing.assert_close(main_grad, expected + 1)


def test_a_second_derivative_is_refused(device):
    problem = gaussian([5, 3], 32, 64, device=device)
    x = problem.x.requires_grad_()
    y = moxie.grouped_mm(x, problem.w, problem.offs)
    with pytest.raises(RuntimeError, match="grouped_mm: a second derivative is not implemented"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


# ---- the gradient that comes in --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_expanded_gradient_is_a_full_one(recipe, device):
    """y.sum().backward() passes on a gradient that is one element expanded to a matrix, with strides of zero."""
    problem = gaussian(RAGGED, 72, 160, tail=9, device=device, bias="gn")
    problem.dy = torch.ones_like(problem.dy)
    expected = run(problem, recipe)
    problem.dy = torch.ones((), dtype=problem.dy.dtype, device=device).expand(problem.dy.shape)
    for actual in (run(problem, recipe), summed(problem, recipe)):
        for name in ("dx", "dw", "dbias"):
            assert_same_bytes(getattr(actual, name), getattr(expected, name), name)


def summed(problem: Problem, recipe):
    x, w, bias = (t.detach().requires_grad_() for t in (problem.x, problem.w, problem.bias))
    moxie.grouped_mm(x, w, problem.offs, recipe=recipe, bias=bias).sum().backward()
    return type("Grads", (), {"dx": x.grad, "dw": w.grad, "dbias": bias.grad})


def test_backward_may_run_twice(device):
    problem = gaussian(RAGGED, 64, 96, device=device)
    for recipe in RECIPES:
        x, w = problem.x.detach().requires_grad_(), problem.w.detach().requires_grad_()
        y = moxie.grouped_mm(x, w, problem.offs, recipe=recipe)
        first = torch.autograd.grad(y, (x, w), problem.dy, retain_graph=True)
        assert_same_bytes(torch.autograd.grad(y, (x, w), problem.dy), first, recipe)


def test_a_result_that_is_not_used_gets_no_gradient(device):
    problem = gaussian([5, 3], 32, 64, device=device)
    x = problem.x.requires_grad_()
    unused = moxie.grouped_mm(x, problem.w, problem.offs)
    (x * 2).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2)) and unused.grad_fn is not None


@pytest.mark.parametrize(
    "x_dtype, w_dtype, bias_dtype",
    (
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, torch.float32),
    ),
    ids=str,
)
def test_each_gradient_has_the_dtype_of_what_it_is_a_gradient_of(x_dtype, w_dtype, bias_dtype, device):
    for recipe in RECIPES:
        problem = gaussian(RAGGED, 64, 96, dtype=x_dtype, w_dtype=w_dtype, bias="n", device=device)
        problem.bias = problem.bias.to(torch.bfloat16).to(bias_dtype)
        results = assert_straight_through(problem, recipe)
        dtypes = [t.dtype for t in (*results, results.dbias)]
        assert dtypes == [x_dtype, x_dtype, w_dtype, bias_dtype]


# ---- only what is needed ---------------------------------------------------------------------------------------------------


class Spy(TorchDispatchMode):
    """Records the names of the Moxie ops that run, and for quantizers how many forms they make."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "moxie":
            forms = {2: " one form", 4: " both forms"}[len(result)] if isinstance(result, list) else ""
            self.names.append(func._schema.name.split("::")[1] + forms)
        return result


def ops_of(problem: Problem, recipe, needs: str, **kwargs) -> tuple[list[str], list[str]]:
    """Returns the names of the ops that forward and backward run if only the inputs named in `needs` require gradients."""
    inputs = {name: getattr(problem, name).detach().requires_grad_(name in needs.split()) for name in ("x", "w", "bias")}
    with Spy() as forward:
        y = moxie.grouped_mm(inputs["x"], inputs["w"], problem.offs, recipe=recipe, bias=inputs["bias"], **kwargs)
    with Spy() as backward:
        y.backward(problem.dy.to(y.dtype))
    for name, tensor in inputs.items():
        assert (tensor.grad is not None) == (name in needs.split() and not (name == "w" and "main_grad" in kwargs))
    return forward.names, backward.names


GEMMS = ("grouped_dgrad", "grouped_wgrad", "grouped_wgrad_add_", "sum_groups")


@pytest.mark.parametrize(
    "needs, expected",
    (
        ("x", ["grouped_dgrad"]),
        ("w", ["grouped_wgrad"]),
        ("bias", ["sum_groups"]),
        ("x w", ["grouped_dgrad", "grouped_wgrad"]),
        ("x bias", ["grouped_dgrad", "sum_groups"]),
        ("x w bias", ["grouped_dgrad", "grouped_wgrad", "sum_groups"]),
    ),
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_only_the_gradients_that_are_needed_are_computed(recipe, needs, expected, device):
    problem = gaussian(RAGGED, 64, 96, device=device, bias="n")
    _, backward = ops_of(problem, recipe, needs)
    assert [name for name in backward if name in GEMMS] == expected


@pytest.mark.parametrize("recipe", ("mxfp8_rceil", "mxfp8_rceil_32x32", "mxfp8_rceil_128"))
def test_each_tensor_is_quantized_once_per_step(recipe, device):
    """Forward reads x and w once each, and backward reads dy once: no tensor is quantized a second time."""
    problem = gaussian([2000, 2100], 64, 96, device=device, bias="n")
    forward, backward = ops_of(problem, recipe, "x w")
    assert [n for n in forward if "quantize" in n] == ["_quantize both forms"] * 2
    assert [n for n in backward if "quantize" in n] == ["_quantize both forms"]
    cache = moxie.WeightCache(problem.w, recipe=recipe)
    forward, backward = ops_of(problem, recipe, "x w", quantized_w=cache)
    assert [n for n in forward if "quantize" in n] == ["_quantize both forms"], "x alone: w comes quantized"
    forward, _ = ops_of(problem, recipe, "x")
    assert [n for n in forward if "quantize" in n] == ["_quantize one form", "_quantize both forms"], "x is not for wgrad"


def test_inputs_that_need_no_gradient_give_a_result_that_needs_none(device):
    problem = gaussian([5, 3], 32, 64, device=device)
    assert not moxie.grouped_mm(problem.x, problem.w, problem.offs).requires_grad


# ---- what is kept for backward ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def saved_tensors():
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        yield saved


def activation_bytes(rows: int, groups: int, k: int, recipe: str) -> int:
    """Returns the bytes that forward keeps of x, found with meta tensors. x requires no gradient, so nothing of w is kept."""
    x = torch.empty(rows, k, dtype=torch.bfloat16, device="meta")
    w = torch.empty(groups, 64, k, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with saved_tensors() as saved:
        moxie.grouped_mm(x, w, torch.empty(groups, dtype=torch.int32, device="meta"), recipe=recipe)
    return sum(t.nbytes for t in saved if t.dtype != torch.int32)  # offs


@pytest.mark.parametrize("k", (128, 7168))
@pytest.mark.parametrize("groups", (8, 32, 64, 256))
@pytest.mark.parametrize("rows", (2048, 8192, 32768, 131072))
def test_what_is_kept_of_x_is_one_byte_per_element_of_its_padded_groups(rows, groups, k):
    """Forward keeps only the colwise form of x. It has the rows of all groups, each padded to the block, and at most 255 more."""
    assert activation_bytes(rows, groups, k, "bf16") == rows * k * 2
    for recipe in (name for name in QUANTIZED if not name.endswith("_hp")):
        fields = moxie.Recipe.from_name(recipe)
        block = 16 if fields.scaling == "row" else block_shape(fields.wgrad_x)[0]
        padded = rows + groups * (block - 1) + 255
        scales = groups * k * 4 if fields.scaling == "row" else padded * k / 32
        kept = activation_bytes(rows, groups, k, recipe)
        assert rows * k < kept <= padded * k + scales, recipe
        assert kept == moxie.explain(recipe, 64, k, rows=rows, groups=groups, device="cpu").x_bytes
        if rows >= 1600 * groups:
            assert kept <= (0.55 if block == 128 else 0.57) * rows * k * 2, recipe


def test_what_is_kept_has_one_form_whatever_the_rows_and_groups():
    for recipe in QUANTIZED:
        kinds = set()
        for rows, groups in ((1, 1), (3, 1024), (2048, 256), (131072, 8)):
            x = torch.empty(rows, 128, dtype=torch.bfloat16, device="meta")
            w = torch.empty(groups, 64, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
            with saved_tensors() as saved:
                moxie.grouped_mm(x, w, torch.empty(groups, dtype=torch.int32, device="meta"), recipe=recipe)
            kinds.add(tuple((t.dtype, t.dim()) for t in saved))
        assert len(kinds) == 1, recipe


@pytest.mark.parametrize("recipe", [name for name in QUANTIZED if not name.endswith("_hp")])
def test_no_activation_is_kept_in_high_precision(recipe, device):
    for sizes in ([37, 0, 20], [2000, 2100]):
        problem = gaussian(sizes, 64, 96, device=device)
        x, w = problem.x.requires_grad_(), problem.w.requires_grad_()
        with saved_tensors() as saved:
            moxie.grouped_mm(x, w, problem.offs, recipe=recipe)
        large = [t for t in saved if t.numel() >= x.numel()]
        assert large and all(t.dtype == torch.float8_e4m3fn for t in large)
        wide = [t for t in saved if t.dtype in (torch.bfloat16, torch.float32)]  # may only hold scales per row or column
        assert all(t.numel() <= 3 * sum(x.shape) for t in wide)


def test_x_is_freed_after_forward(device):
    x = random_values(100, 64, device=device).requires_grad_() * 2
    w, offs, alive = torch.randn(1, 32, 64, device=device, requires_grad=True), sizes_to_offs([100], device), weakref.ref(x)
    y = moxie.grouped_mm(x, w, offs)
    del x
    gc.collect()
    assert alive() is None
    y.sum().backward()


def test_x_may_be_overwritten_after_forward(device):
    """A later op may change x in place, because backward reads the quantized copy of x."""
    problem = gaussian(RAGGED, 64, 96, device=device)
    expected = run(problem, "mxfp8_rceil")
    x, w = problem.x.clone().requires_grad_(), problem.w.detach().requires_grad_()
    inner = x.clone()
    y = moxie.grouped_mm(inner, w, problem.offs, recipe="mxfp8_rceil")
    inner.mul_(3)
    y.backward(problem.dy)
    assert_same_bytes((x.grad, w.grad), (expected.dx, expected.dw))


# ---- main gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_backward_adds_to_the_main_gradient(recipe, device):
    problem = gaussian(RAGGED, 64, 96, dtype=torch.float32, device=device)
    single = run(problem, recipe)
    main_grad = torch.full_like(problem.w, 0.5)
    for step in (1, 2):
        results = run(problem, recipe, main_grad=main_grad)
        assert results.dw is None
        assert_same_bytes((results.y, results.dx), (single.y, single.dx))
        torch.testing.assert_close(main_grad, 0.5 + step * single.dw, rtol=1e-5, atol=1e-4)
    assert (main_grad[1] == 0.5).all(), "the gradient of an expert without tokens is zero"


def test_a_main_gradient_of_bf16_weights_keeps_f32(device):
    problem = gaussian(RAGGED, 64, 96, device=device)
    main_grad = torch.zeros(problem.w.shape, device=device)
    assert run(problem, main_grad=main_grad).dw is None
    expected = assert_straight_through(
        Problem(problem.x, problem.w.float(), problem.dy, problem.offs), "mxfp8_rceil_128", dtype=torch.bfloat16
    ).dw
    torch.testing.assert_close(main_grad, expected, rtol=1e-5, atol=1e-4)
    assert (main_grad != main_grad.bfloat16().float()).any()


def test_nothing_is_added_where_w_needs_no_gradient(device):
    problem = gaussian(RAGGED, 64, 96, device=device)
    main_grad = torch.zeros(problem.w.shape, device=device)
    x = problem.x.requires_grad_()
    moxie.grouped_mm(x, problem.w, problem.offs, main_grad=main_grad).sum().backward()
    assert not main_grad.any() and x.grad.any()


def test_one_wgrad_writes_the_main_gradient_in_eager_mode(device):
    problem = gaussian(RAGGED, 64, 96, device=device, bias="n")
    _, backward = ops_of(problem, "mxfp8_rceil_128", "w", main_grad=torch.zeros(problem.w.shape, device=device))
    assert [name for name in backward if name in GEMMS] == ["grouped_wgrad_add_"]


def test_weights_used_twice_add_up_in_one_main_gradient(device):
    """main_grad accumulates if a weight is used twice before backward, as with shared experts or interleaved micro-batches."""
    problem = gaussian(RAGGED, 64, 96, dtype=torch.float32, device=device)
    single = run(problem, "mxfp8_rceil")
    main_grad, w = torch.zeros_like(problem.w), problem.w.detach().requires_grad_()
    ys = [moxie.grouped_mm(problem.x, w, problem.offs, recipe="mxfp8_rceil", main_grad=main_grad) for _ in range(2)]
    for y in ys:
        y.backward(problem.dy)
    torch.testing.assert_close(main_grad, 2 * single.dw, rtol=1e-5, atol=1e-4)


def test_a_main_gradient_may_be_zeroed_between_forward_and_backward(device):
    problem = gaussian(RAGGED, 64, 96, dtype=torch.float32, device=device)
    expected = run(problem).dw
    main_grad, w = torch.ones_like(problem.w), problem.w.detach().requires_grad_()
    y = moxie.grouped_mm(problem.x, w, problem.offs, main_grad=main_grad)
    main_grad.zero_()
    y.backward(problem.dy)
    torch.testing.assert_close(main_grad, expected, rtol=1e-5, atol=1e-4)


def test_hooks_that_copy_what_is_saved_do_not_lose_the_main_gradient(device):
    """Saved-tensor hooks, such as those that offload activations, copy tensors; dw must still be added to the caller's
    main_grad."""
    problem = gaussian(RAGGED, 64, 96, dtype=torch.float32, device=device)
    expected = run(problem).dw
    main_grad = torch.zeros_like(problem.w)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        run(problem, main_grad=main_grad)
    torch.testing.assert_close(main_grad, expected, rtol=1e-5, atol=1e-4)
