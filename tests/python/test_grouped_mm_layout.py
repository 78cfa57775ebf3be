"""Layouts of scales if operands are decoded. On a CPU, these tests plan as for a GPU, and so use the GPU's layouts.

The layout of scales must not change a result: each pass must give the same bytes as the bf16 product of operands that were
quantized with plain scales and decoded.
"""

import contextlib
import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import moxie
from grouped_reference import Problem, assert_same_results, decoded_product, gaussian, run, varied
from moxie.mx_tensor import MXTensor
from support import assert_same_bytes

ops = torch.ops.moxie
BY_32 = [
    "mxfp8_rceil",
    "mxfp8_floor",
    "mxfp8_rceil_32x32",
    "mxfp8_rceil_wgrad_with_hp",
    "mxfp8_emulated_even",
    "broken_scales:activations=1x32,weights=1x32,wgrad_dy=32x1,wgrad_x=32x32",
]
OTHERS = ["mxfp8_rceil_128", "mxfp8_rceil:wgrad_dy=128x1,wgrad_x=128x1", "fp8_rowwise", "bf16"]
LARGE, SMALL = [170, 0, 300, 90], [37, 0, 5, 11, 2]


@contextlib.contextmanager
def as_on_a_gpu():
    ops._pretend_gpu("other")
    try:
        yield
    finally:
        ops._pretend_gpu("")


@pytest.fixture
def like_gpu():
    with as_on_a_gpu():
        yield


# ---- which layout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", BY_32)
def test_blocks_of_32_have_swizzled_scales(recipe, like_gpu):
    scales = moxie.quantize_weights(torch.randn(2, 64, 96), recipe=recipe)[1::2]
    assert [s.shape for s in scales] == [(2, 512), (2, 512)]


@pytest.mark.parametrize("recipe", OTHERS[:2])
def test_larger_blocks_have_plain_ones(recipe, like_gpu):
    assert [s.dim() for s in moxie.quantize_weights(torch.randn(2, 64, 96), recipe=recipe)[1::2]] == [3, 3]


@pytest.mark.parametrize("recipe", BY_32)
def test_a_cpu_has_plain_ones(recipe):
    assert [s.dim() for s in moxie.quantize_weights(torch.randn(2, 64, 96), recipe=recipe)[1::2]] == [3, 3]


@pytest.mark.parametrize("recipe", ("mxfp8_rceil", "mxfp8_rceil_wgrad_with_hp", "mxfp8_emulated_floor"))
def test_traced_tensors_of_a_gpu_have_its_layout(recipe):
    """Meta kernels see tensors on the meta device. They must still choose the scale layout of the GPU for which a graph is
    traced."""
    problem = gaussian(LARGE, 64, 96)
    ops._pretend_gpu("other", gpus_only=True)
    try:
        assert moxie.quantize_weights(problem.w, recipe=recipe)[1].dim() == 3
        with FakeTensorMode(allow_non_fake_inputs=True):
            x, w, offs = (torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in (problem.x, problem.w, problem.offs))
            forms = moxie.quantize_weights(w, recipe=recipe)
            assert forms[1].dim() == forms[3].dim() == 2
            w2 = torch.empty(len(offs), 96, 32, dtype=x.dtype, device="cuda")
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    assert moxie.grouped_mm(x, w, offs, recipe=recipe, quantized_w=forms).shape == problem.dy.shape
                    assert moxie.grouped_mm(x, w, offs, recipe=recipe).shape == problem.dy.shape
                    assert moxie.expert_mlp(x, w, w2, offs, recipe=recipe).shape == x.shape
    finally:
        ops._pretend_gpu("")


# ---- the same bytes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", (LARGE, SMALL, [300]), ids=str)
@pytest.mark.parametrize("recipe", BY_32[:-1])
def test_the_passes_multiply_what_plain_scales_decode_to(recipe, sizes, like_gpu):
    problem = varied(sizes)
    assert_same_results(run(problem, recipe), decoded_product(problem, recipe))


@pytest.mark.parametrize("rows, n, k", ((256, 128, 256), (100, 96, 160)))
def test_without_offs_where_the_shape_does_not_tell_the_layout(rows, n, k, like_gpu):
    problem = varied([rows - 7], n, k)
    problem.offs = None
    assert_same_results(run(problem, "mxfp8_rceil"), decoded_product(problem, "mxfp8_rceil"))


@pytest.mark.parametrize("recipe", BY_32 + OTHERS)
def test_every_recipe_gives_what_a_cpu_gives_with_plain_scales(recipe):
    """Swizzled scales give the results of plain ones up to the order of summation: with plain scales a CPU decodes and adds panel
    by panel."""
    for sizes in (LARGE, SMALL):
        for dtype in (torch.bfloat16, torch.float32):
            problem = varied(sizes, dtype=dtype)
            with as_on_a_gpu():
                actual = run(problem, recipe)
            for a, b in zip(actual, run(problem, recipe)):
                scale = b.float().abs().max().item()
                torch.testing.assert_close(a, b, rtol=2.0**-7 if dtype == torch.bfloat16 else 2.0**-18, atol=2.0**-18 * scale)


@pytest.mark.parametrize("recipe", BY_32)
def test_an_mlp_is_the_chain_of_its_products(recipe, like_gpu):
    problem = gaussian(LARGE, 128, 96, tail=4)
    leaves = [problem.x, problem.w, torch.randn(len(LARGE), 96, 64).bfloat16()]

    def grads(call):
        x, w13, w2 = (t.detach().requires_grad_() for t in leaves)
        y = call(x, w13, w2)
        y.backward(problem.x)
        return [y.detach(), x.grad, w13.grad, w2.grad]

    def chain(x, w13, w2):
        h = moxie.grouped_mm(x, w13, problem.offs, recipe=recipe)
        return moxie.grouped_mm(moxie.swiglu(h), w2, problem.offs, recipe=recipe)

    assert_same_bytes(grads(lambda *of: moxie.expert_mlp(*of, problem.offs, recipe=recipe)), grads(chain))


@pytest.mark.parametrize("sizes", (LARGE, SMALL), ids=str)
@pytest.mark.parametrize("recipe", ("mxfp8_rceil", "mxfp8_rceil_wgrad_with_hp"))
def test_an_x_that_came_quantized_keeps_its_plain_scales(recipe, sizes, like_gpu):
    problem = varied(sizes)
    mx, w = MXTensor.to_mx(problem.x), problem.w.detach().requires_grad_()
    y = moxie.grouped_mm(mx, w, problem.offs, recipe=recipe)
    y.backward(problem.dy)
    decoded = Problem(mx.dequantize(), problem.w, problem.dy, problem.offs)
    # decoded_product quantizes the decoded values once more, which does not change them.
    expected = decoded_product(decoded, recipe)
    assert_same_bytes([y.detach(), w.grad], [expected.y, expected.dw])


def test_a_main_gradient_and_a_compiled_product(like_gpu):
    problem = varied(LARGE, dtype=torch.float32)
    expected, main_grad = run(problem, "mxfp8_rceil"), torch.zeros(problem.w.shape)
    run(problem, "mxfp8_rceil", main_grad=main_grad)
    assert_same_bytes(main_grad, expected.dw)
    torch._dynamo.reset()
    function = torch.compile(
        lambda x, w, offs: moxie.grouped_mm(x, w, offs, recipe="mxfp8_rceil"), backend="aot_eager", fullgraph=True
    )
    for sizes in (LARGE, SMALL):
        problem = varied(sizes)
        x, w = problem.x.detach().requires_grad_(), problem.w.detach().requires_grad_()
        y = function(x, w, problem.offs)
        y.backward(problem.dy)
        assert_same_results((y.detach(), x.grad, w.grad), run(problem, "mxfp8_rceil"))


# ---- scales that the caller made -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", BY_32[:-1])
def test_a_cache_may_be_used_and_refreshed_where_it_was_not_filled(recipe):
    """A cache moves with its module from a CPU to a GPU and back, and keeps the scale layout of the device where it was
    filled."""
    problem = varied(LARGE)
    on_cpu = moxie.WeightCache(problem.w, recipe=recipe)
    with as_on_a_gpu():
        expected = decoded_product(problem, recipe)
        on_gpu = moxie.WeightCache(problem.w, recipe=recipe)
        assert on_cpu.scale.dim() == 3 and on_gpu.scale.dim() == 2
        moved_to_gpu, moved_to_cpu = copy.deepcopy(on_cpu), copy.deepcopy(on_gpu)
        for cache in (on_gpu, moved_to_gpu):
            assert_same_results(run(problem, recipe, quantized_w=cache), expected)
        problem.w.mul_(-4)
        doubled = decoded_product(problem, recipe)
        for cache in (on_gpu, moved_to_gpu):
            assert_same_results(run(problem, recipe, quantized_w=cache.refresh_(problem.w)), doubled)
    plain = on_cpu.refresh_(problem.w).tensors
    moved_to_cpu.refresh_(problem.w)
    assert moved_to_gpu.scale.dim() == 3 and moved_to_cpu.scale.dim() == 2
    assert_same_bytes(moved_to_gpu.tensors, plain)
    assert_same_bytes(moved_to_cpu.tensors, on_gpu.tensors)
    for actual, expected in zip(run(problem, recipe, quantized_w=moved_to_cpu), run(problem, recipe, quantized_w=on_cpu)):
        scale = expected.float().abs().max().item()
        torch.testing.assert_close(actual, expected, rtol=2.0**-7, atol=2.0**-18 * scale)


@pytest.mark.parametrize("gpu", ("", "other"))
def test_the_passes_take_plain_scales_unless_told_otherwise(gpu):
    recipe, problem = "mxfp8_rceil", varied(LARGE)
    offs, rows = problem.offs, len(problem.x)
    forms = {
        layout: [moxie.quantize_both(t, offs=offs, scale_layout=layout) for t in (problem.x, problem.dy)]
        for layout in ("plain", "swizzled")
    }
    weights = {layout: moxie.quantize_both(problem.w, scale_layout=layout) for layout in ("plain", "swizzled")}
    ops._pretend_gpu(gpu)
    try:
        expected = decoded_product(problem, recipe)
        for layout, (x, dy) in forms.items():
            said = {"recipe": recipe} if layout == "plain" else {"recipe": recipe, "scale_layout": layout}
            for of_w, w in weights.items():
                if layout == of_w == "plain":
                    continue  # with plain scales for both, a CPU multiplies panel by panel and sums in another order
                assert_same_bytes(moxie.grouped_fwd(*x[:2], *w[:2], offs, **said), expected.y)
                assert_same_bytes(moxie.grouped_dgrad(*dy[:2], *w[2:], offs, **said), expected.dx)
            dw = moxie.grouped_wgrad(*dy[2:], *x[2:], rows, offs, dtype=torch.float32, **said)
            added = torch.zeros_like(dw)
            moxie.grouped_wgrad_add_(added, *dy[2:], *x[2:], rows, offs, **said)
            assert_same_bytes(added, dw)
            torch.testing.assert_close(dw, expected.dw.float(), rtol=2.0**-7, atol=2.0**-16 * dw.abs().max().item())
    finally:
        ops._pretend_gpu("")


def test_a_path_with_a_gemm_takes_its_own_layout_alone():
    problem = gaussian(LARGE, 64, 96)
    x, w = moxie.quantize_both(problem.x, offs=problem.offs), moxie.quantize_both(problem.w)
    call = lambda **said: moxie.grouped_fwd(*x[:2], *w[:2], problem.offs, recipe="mxfp8_rceil", **said)
    with pytest.raises(ValueError, match="grouped_fwd: scale_layout must be plain, swizzled or quads, got 'tiled'"):
        call(scale_layout="tiled")
    with pytest.raises(ValueError, match=r"grouped_fwd: x_scale must be \[1072, 4\], got \[560, 3\]"):
        call(scale_layout="swizzled")
    ops._pretend_gpu("sm100")
    try:
        with pytest.raises(ValueError, match="sm100 multiplies operands whose scales are swizzled, got scale_layout='plain'"):
            call(scale_layout="plain")
    finally:
        ops._pretend_gpu("")
