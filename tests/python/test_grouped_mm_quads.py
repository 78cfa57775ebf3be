"""Scales in quads, which Hopper's kernel reads. On a CPU the tests plan as for a Hopper GPU, and the kernel's reference runs.

The layout of scales must not change a result: scales made in quads, plain scales, and decoded operands must all agree.
"""

import copy

import pytest
import torch

import moxie
from grouped_reference import assert_same_results, decoded_product, run, varied
from moxie.mx_tensor import MXTensor
from support import assert_same_bytes

ops = torch.ops.moxie
RECIPE = "mxfp8_rceil_128"
N, K = 48, 656  # K has six blocks of 128, so its scales fill one quad and part of a second, which is padded
RAGGED, DEEP = [170, 0, 300, 90, 128], [1500, 1501]
BLOCKS = {"rowwise_block": "1x128", "colwise_block": "128x1"}


@pytest.fixture
def like_hopper():
    ops._pretend_gpu("sm90")
    yield
    ops._pretend_gpu("")


def passes_of(problem, layout, said=None):
    """Quantizes the operands with scales in `layout` and runs the three passes, with `said` as their scale_layout argument."""
    offs, rows = problem.offs, len(problem.x)
    how = {"offs": offs, "scale_layout": layout}
    x = moxie.quantize_both(problem.x, rowwise_block="1x128", colwise_block="128x32", **how)
    dy = moxie.quantize_both(problem.dy, **BLOCKS, **how)
    w = moxie.quantize_both(problem.w, rowwise_block="128x128", colwise_block="128x128", scale_layout=layout)
    told = {"recipe": RECIPE, "scale_layout": said}
    return (
        moxie.grouped_fwd(*x[:2], *w[:2], offs, **told),
        moxie.grouped_dgrad(*dy[:2], *w[2:], offs, **told),
        moxie.grouped_wgrad(*dy[2:], *x[2:], rows, offs, **told),
    )


def test_weights_have_scales_in_quads(like_hopper):
    _, scale, _, scale_t = moxie.quantize_weights(torch.randn(2, 304, 1104), recipe=RECIPE)
    assert scale.shape == (2, 3 * 3, 4) and scale_t.shape == (2, 1 * 9, 4)


@pytest.mark.parametrize("blocks", ["wgrad_dy=32x1,wgrad_x=32x1", "wgrad_dy=32x1,wgrad_x=32x32"])
def test_recipes_with_other_blocks_in_wgrad_have_plain_scales(blocks, like_hopper):
    assert moxie.quantize_weights(torch.randn(2, 256, 256), recipe=f"{RECIPE}:{blocks}")[1].shape == (2, 2, 2)


def test_the_passes_read_plain_scales_and_quads_alike(like_hopper):
    problem = varied(RAGGED, N, K)
    assert_same_results(passes_of(problem, "quads", "quads"), passes_of(problem, "plain"))


@pytest.mark.parametrize("sizes", [RAGGED, DEEP], ids=["ragged", "deep"])
def test_the_node_gives_what_its_passes_give(sizes, like_hopper):
    problem = varied(sizes, 16, 528)
    results = run(problem, RECIPE)
    y, dx, dw = passes_of(problem, "plain")
    assert_same_bytes(results.y, y, "y")
    assert_same_bytes(results.dx, dx, "dx")
    assert_same_bytes(results.dw, dw, "dw")


@pytest.mark.parametrize(("n", "k"), [(40, 656), (48, 650)], ids=["n", "k"])
def test_what_the_kernel_does_not_take_is_decoded(n, k, like_hopper):
    problem = varied(RAGGED, n, k)
    assert_same_results(run(problem, RECIPE), decoded_product(problem, RECIPE))


@pytest.mark.parametrize("layout", ["plain", "quads"])
@pytest.mark.parametrize(
    ("n", "k"), [(48, 656), (256, 512), (512, 400), (512, 656)], ids=["neither has four blocks", "w has", "both have", "w_t has"]
)
def test_a_weight_cache_in_either_layout_gives_the_same_and_is_refreshed_as_it_is(layout, n, k, like_hopper):
    problem = varied([17, 0, 30], n, k)
    expected = run(problem, RECIPE)
    if layout == "plain":
        ops._pretend_gpu("")
    cache = list(moxie.quantize_weights(problem.w, recipe=RECIPE))
    ops._pretend_gpu("sm90")
    outer, blocks = -(-n // 128), -(-k // 128)
    assert cache[1].shape == ((3, outer, blocks) if layout == "plain" else (3, -(-blocks // 4) * outer, 4))
    before = copy.deepcopy([t.view(torch.uint8) for t in cache])
    for t in cache:
        t.view(torch.uint8).fill_(7)
    ops.quantize_weights.out(problem.w, recipe=RECIPE, qdata=cache[0], scale=cache[1], qdata_t=cache[2], scale_t=cache[3])
    for now, then in zip(cache, before):
        assert torch.equal(now.view(torch.uint8), then)
    x, w = problem.x.clone().requires_grad_(), problem.w.clone().requires_grad_()
    y = ops.grouped_mm(x, w, problem.offs, recipe=RECIPE, quantized_w=cache)
    y.backward(problem.dy)
    assert_same_results((y, x.grad, w.grad), expected)


def test_an_mx_tensor_gives_what_its_x_gives(like_hopper):
    problem = varied(RAGGED, N, K)
    x = MXTensor.to_mx(problem.x, block="1x128")
    y = moxie.grouped_mm(x, problem.w, problem.offs, recipe=RECIPE)
    assert_same_bytes(y, run(problem, RECIPE).y, "y")


def test_swizzled_scales_are_refused(like_hopper):
    with pytest.raises(ValueError, match="sm90 multiplies operands whose scales are plain or quads, got scale_layout='swizzled'"):
        passes_of(varied(RAGGED, N, K), "plain", "swizzled")


def test_swizzled_scales_of_w_are_refused(like_hopper):
    problem = varied([40], N, K)
    w = moxie.quantize_both(problem.w, rowwise_block="128x128", colwise_block="128x128", scale_layout="swizzled")
    with pytest.raises(ValueError, match=r"w_scale must be \[1, 1, 6\], got \[1, 3072\]"):
        ops.grouped_mm(problem.x, problem.w, problem.offs, recipe=RECIPE, quantized_w=list(w))


def test_a_pass_names_the_layout_that_it_was_given(like_hopper):
    with pytest.raises(
        ValueError,
        match=r"x_scale must be \[47, 6\], got \[94, 4\], which has the shape of quads scales; "
        "pass scale_layout='quads'",
    ):
        passes_of(varied([40], N, K), "quads")


def test_quads_of_blocks_of_32_are_refused():
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    with pytest.raises(
        ValueError, match="quantize_rowwise: scales in quads need blocks of 128 columns in the rowwise form, got 1x32"
    ):
        moxie.quantize_rowwise(x, scale_layout="quads")
    with pytest.raises(ValueError, match="quantize_both: scales in quads need blocks of 128 rows in the colwise form, got 32x1"):
        moxie.quantize_both(x, rowwise_block="1x128", scale_layout="quads")


def test_the_wrong_layout_is_named():
    x = torch.randn(130, 640, dtype=torch.bfloat16)
    qdata, scale = moxie.quantize_rowwise(x, block="1x128", scale_layout="quads")
    with pytest.raises(
        ValueError,
        match=r"scale must be \[130, 5\], got \[260, 4\], which has the shape of quads scales; "
        "pass scale_layout='quads'",
    ):
        moxie.dequantize_rowwise(qdata, scale, block="1x128")
    back = moxie.dequantize_rowwise(qdata, scale, block="1x128", scale_layout="quads")
    plain = moxie.quantize_rowwise(x, block="1x128")
    assert_same_bytes(back, moxie.dequantize_rowwise(*plain, block="1x128"))
    offs = torch.tensor([130], dtype=torch.int32)
    with pytest.raises(ValueError, match="which has the shape of quads scales; pass scale_layout='quads'"):
        moxie.dequantize_rowwise(qdata, scale, block="1x128", offs=offs, scale_layout="swizzled")
