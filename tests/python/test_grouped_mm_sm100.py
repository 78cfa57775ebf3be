"""The Blackwell path, tested on a CPU: blackwell.py stands in for torch's block-scaled grouped product."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import moxie
from grouped_reference import Problem, assert_products_equal, gaussian, run, sqnr, straight_through
from support import assert_same_bytes

RECIPES = ("mxfp8_rceil", "mxfp8_floor", "mxfp8_rceil_32x32", "mxfp8_rceil_128")
SIZES = [37, 0, 160, 5, 128]


def emulated(problem: Problem, recipe, **kwargs):
    torch.ops.moxie._pretend_gpu("")
    try:
        return run(problem, recipe, **kwargs)
    finally:
        torch.ops.moxie._pretend_gpu("sm100")


def assert_equal_to_the_reference(results, problem: Problem, recipe) -> None:
    torch.ops.moxie._pretend_gpu("")
    try:
        expected, magnitude = straight_through(problem, recipe, results.y.dtype)
    finally:
        torch.ops.moxie._pretend_gpu("sm100")
    for name in ("y", "dx", "dw"):
        actual = getattr(results, name)
        assert actual.isfinite().all(), name
        # torch's product gives bf16 even if the result is f32, so compare with bf16's tolerance.
        assert_products_equal(actual.bfloat16(), getattr(expected, name), getattr(magnitude, name), name)


@pytest.mark.parametrize(
    "sizes, tail", ((SIZES, 9), ([2000, 0, 1900], 3), ([300], 0), ([0, 0, 7], 0), ([32] * 40, 0), ([1] * 33, 100)), ids=str
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_three_passes_equal_the_emulated_ones(recipe, sizes, tail, sm100):
    problem = gaussian(sizes, 160, 96, tail=tail)
    results = run(problem, recipe)
    assert sm100 == [3, 3, 2], "forward, dgrad and wgrad go through it"
    assert_equal_to_the_reference(results, problem, recipe)
    for actual, expected in zip(results, emulated(problem, recipe)):
        assert sqnr(actual, expected) > 55
    assert not results.y[sum(sizes) :].any() and not results.dx[sum(sizes) :].any()
    for g, size in enumerate(sizes):
        assert size or not results.dw[g].any()


@pytest.mark.parametrize("n, k", ((32, 32), (128, 128), (256, 384), (192, 320)))
@pytest.mark.parametrize("recipe", RECIPES)
def test_scales_of_any_number_of_tiles_are_found(recipe, n, k, sm100):
    problem = gaussian([130, 0, 257], n, k, tail=1)
    # Gives neighbouring elements different magnitudes, so that reading a wrong scale changes the result.
    problem.x *= torch.exp2(torch.randint(-9, 10, problem.x.shape)).bfloat16()
    problem.w *= torch.exp2(torch.randint(-9, 10, problem.w.shape)).bfloat16()
    problem.dy *= torch.exp2(torch.randint(-9, 10, problem.dy.shape)).bfloat16()
    assert_equal_to_the_reference(run(problem, recipe), problem, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_garbage_past_the_groups_changes_nothing(recipe, sm100):
    problem = gaussian(SIZES, 64, 96, tail=40)
    dirty = Problem(problem.x.clone(), problem.w, problem.dy.clone(), problem.offs)
    dirty.x[330:], dirty.dy[330:] = torch.nan, torch.inf
    for actual, expected in zip(run(dirty, recipe), run(problem, recipe)):
        assert_same_bytes(actual, expected)


@pytest.mark.parametrize("bias", ("n", "gn"))
def test_a_bias_is_added_to_the_rows_of_groups_alone(bias, sm100):
    problem = gaussian(SIZES, 64, 96, tail=40, bias=bias)
    results = run(problem, "mxfp8_rceil_128")
    expected = emulated(problem, "mxfp8_rceil_128")
    # On this path the product is rounded to bf16 before the bias is added, so y is rounded twice.
    torch.testing.assert_close(results.y, expected.y, rtol=2.0**-7, atol=2.0**-4)
    assert not results.y[330:].any()
    assert_same_bytes(results.dbias, expected.dbias)


@pytest.mark.parametrize("recipe", RECIPES)
def test_f32_inputs_and_no_offs(recipe, sm100):
    problem = gaussian([256], 64, 96, dtype=torch.float32)
    problem.offs = None
    results = run(problem, recipe)
    assert [t.dtype for t in results] == [torch.float32] * 3
    assert_equal_to_the_reference(results, problem, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_cache_holds_scales_in_the_layout_of_the_path(recipe, sm100):
    problem = gaussian(SIZES, 64, 96)
    cache = moxie.WeightCache(problem.w, recipe=recipe)
    assert cache.scale.shape == (5, 512)
    for actual, expected in zip(run(problem, recipe, quantized_w=cache), run(problem, recipe)):
        assert_same_bytes(actual, expected)
    problem.w.mul_(-4)
    cache.refresh_()
    for actual, expected in zip(run(problem, recipe, quantized_w=cache), run(problem, recipe)):
        assert_same_bytes(actual, expected)


def test_a_main_gradient_grows(sm100):
    problem = gaussian(SIZES, 64, 96, dtype=torch.float32)
    single, main_grad = run(problem), torch.ones_like(problem.w)
    for _ in range(2):
        assert run(problem, main_grad=main_grad).dw is None
    torch.testing.assert_close(main_grad, 1 + 2 * single.dw)


def test_expert_mlp_takes_the_path_too(sm100):
    problem = gaussian(SIZES, 128, 96, tail=4)
    x, w13, w2 = problem.x.requires_grad_(), problem.w.requires_grad_(), torch.randn(5, 96, 64).bfloat16().requires_grad_()
    y = moxie.expert_mlp(x, w13, w2, problem.offs, recipe="mxfp8_rceil")
    y.sum().backward()
    assert sm100 == [3, 3, 3, 2, 3, 2]
    grads = [t.grad.clone() for t in (x, w13, w2)]
    for t in (x, w13, w2):
        t.grad = None
    h = moxie.grouped_mm(x, w13, problem.offs, recipe="mxfp8_rceil")
    again = moxie.grouped_mm(moxie.swiglu(h), w2, problem.offs, recipe="mxfp8_rceil")
    again.sum().backward()
    assert_same_bytes([y, *grads], [again, x.grad, w13.grad, w2.grad])


def test_the_path_compiles(sm100):
    torch._dynamo.reset()
    function = torch.compile(lambda x, w, offs: moxie.grouped_mm(x, w, offs), backend="aot_eager", fullgraph=True)
    for rows in (100, 300):
        problem = gaussian([rows, 0, 40], 64, 96)
        x, w = problem.x.detach().requires_grad_(), problem.w.detach().requires_grad_()
        y = function(x, w, problem.offs)
        y.backward(problem.dy)
        for actual, expected in zip((y, x.grad, w.grad), run(problem)):
            assert_same_bytes(actual, expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_traced_tensors_of_a_gpu_take_its_path(recipe):
    """Meta kernels see tensors on the meta device. They must still plan for the GPU for which a graph is traced: here a GPU
    counts as Blackwell, and the CPU does not."""
    problem, ops = gaussian(SIZES, 64, 96), torch.ops.moxie
    ops._pretend_gpu("sm100", gpus_only=True)
    try:
        assert moxie.quantize_weights(problem.w, recipe=recipe)[1].dim() == 3  # plain, on a CPU
        with FakeTensorMode(allow_non_fake_inputs=True):
            x, w, dy, offs = (
                torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in (problem.x, problem.w, problem.dy, problem.offs)
            )
            forms = moxie.quantize_weights(w, recipe=recipe)
            assert forms[1].dim() == forms[3].dim() == 2  # swizzled
            alone, w2 = (torch.empty(*shape, dtype=x.dtype, device="cuda") for shape in ((1, *w.shape[1:]), (len(offs), 96, 32)))
            for mode in (torch.no_grad, torch.inference_mode):  # in inference mode, ops call each other inside a Meta kernel
                with mode():
                    assert moxie.grouped_mm(x, w, offs, recipe=recipe, quantized_w=forms).shape == dy.shape
                    assert moxie.grouped_mm(x, w, offs, recipe=recipe).shape == dy.shape
                    assert moxie.grouped_mm(x, alone, recipe=recipe).shape == dy.shape
                    assert moxie.expert_mlp(x, w, w2, offs, recipe=recipe).shape == x.shape
            blocks = moxie.Recipe.from_name(recipe)
            x8, dy8 = (
                moxie.quantize_both(
                    t, offs=offs, rowwise_block=blocks.activations, colwise_block=colwise, scale_layout="swizzled"
                )
                for t, colwise in ((x, blocks.wgrad_x), (dy, blocks.wgrad_dy))
            )
            assert moxie.grouped_fwd(*x8[:2], *forms[:2], offs, recipe=recipe).shape == dy.shape
            assert ops.grouped_dgrad(*dy8[:2], *forms[2:], offs, recipe=recipe).shape == x.shape
            assert ops.grouped_wgrad(*dy8[2:], *x8[2:], len(x), offs, recipe=recipe).shape == w.shape
    finally:
        ops._pretend_gpu("")


def test_a_recipe_that_asks_for_emulation_gets_it(sm100):
    problem = gaussian(SIZES, 64, 96)
    run(problem, "mxfp8_emulated_rceil")
    run(problem, "fp8_rowwise")
    run(problem, "bf16")
    assert sm100 == []


def test_wgrad_with_hp_keeps_wgrad_off_the_path(sm100):
    problem = gaussian(SIZES, 64, 96)
    results = run(problem, "mxfp8_rceil_wgrad_with_hp")
    assert sm100 == [3, 3]
    assert_same_bytes(results.dw, emulated(problem, "mxfp8_rceil_wgrad_with_hp").dw)
