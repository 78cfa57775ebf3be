"""The padding after the rows of a group, and the memory past the last group, may hold anything (NUMERICS.md, sections 7 and 10).

No element and no scale of these operands is zero, so every zero in a buffer that a quantizer has filled is padding.
"""

import contextlib

import pytest
import torch

import blackwell
import moxie
import test_grouped_mm_rows
from grouped_reference import pretended_gpu
from support import assert_same_bytes, sizes_to_offs

N, K, SIZES, TAIL = 96, 160, [37, 0, 160, 1, 128, 5], 11
ROWS = sum(SIZES) + TAIL


def values(*shape, device, seed):
    """Returns random values that are never zero: magnitudes of 1 to 2, times a power of two for each column."""
    generator = torch.Generator().manual_seed(seed)
    x = (1 + torch.rand(shape, generator=generator)) * (1 - 2 * torch.randint(0, 2, shape, generator=generator))
    return (x * torch.exp2(torch.randint(-5, 6, shape[-1:], generator=generator))).bfloat16().to(device)


def soiled(tensor):
    """Returns the tensor with NaN, infinity or random bytes in place of its zeros, which are padding."""
    raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    if raw.dtype == torch.uint8:
        anything = torch.randint(0, 256, raw.shape, device=raw.device, dtype=torch.uint8)
        nan = 0x7F if tensor.dtype == torch.float8_e4m3fn else 255
        anything = torch.where(torch.rand(raw.shape, device=raw.device) < 0.5, nan, anything)
    else:
        anything = torch.where(torch.rand(raw.shape, device=raw.device) < 0.5, torch.nan, torch.inf).to(raw.dtype)
    return torch.where(raw == 0, anything, raw).view(tensor.dtype)


def operands(recipe, x, offs, layout, colwise):
    """Returns the rowwise and the colwise form of tokens. In high precision both are x itself, whose rows past the last group are
    padding."""
    fields = moxie.Recipe.from_name(recipe)
    if fields.scaling == "none":
        return (x, None), (x, None)
    if fields.scaling == "row":
        forms = (*moxie.quantize_per_row(x, offs=offs), *moxie.quantize_per_col(x, offs=offs))
    else:
        forms = moxie.quantize_both(
            x, offs=offs, rowwise_block=fields.activations, colwise_block=colwise, rule=fields.rule, scale_layout=layout
        )
    return forms[:2], (x, None) if fields.wgrad_with_hp else forms[2:]


def passes(recipe, x, dy, w, bias, offs, layout, dtype, change):
    """Quantizes the operands, applies `change` to each, and runs the passes. Returns y, dx, dw and a main gradient."""
    fields = moxie.Recipe.from_name(recipe)
    x_row, x_col = operands(recipe, x, offs, layout, fields.wgrad_x)
    dy_row, dy_col = operands(recipe, dy, offs, layout, fields.wgrad_dy)
    x_row, x_col, dy_row, dy_col = ([None if t is None else change(t) for t in form] for form in (x_row, x_col, dy_row, dy_col))
    w_forms = (w, None, w, None) if fields.scaling == "none" else moxie.quantize_weights(w, recipe=recipe)
    how = {"recipe": recipe, "scale_layout": layout if fields.scaling == "block" else None}
    main_grad = torch.ones(w.shape, device=w.device)
    moxie.grouped_wgrad_add_(main_grad, *dy_col, *x_col, ROWS, offs, **how)
    return (
        moxie.grouped_fwd(*x_row, *w_forms[:2], offs, bias=bias, dtype=dtype, **how),
        moxie.grouped_dgrad(*dy_row, *w_forms[2:], offs, dtype=dtype, **how),
        moxie.grouped_wgrad(*dy_col, *x_col, ROWS, offs, dtype=dtype, **how),
        main_grad,
    )


@contextlib.contextmanager
def on(gpu):
    """Plans calls as for this GPU, with a stand-in for torch's products. "" stands for the device that is really there."""
    if not gpu:
        yield
        return
    stand_in = blackwell.stand_in if gpu == "sm100" else test_grouped_mm_rows.stand_in
    with pretended_gpu(gpu, stand_in):
        yield


def layouts(recipe, gpu):
    fields = moxie.Recipe.from_name(recipe)
    if fields.scaling != "block":
        return ("plain",)
    if gpu == "sm100":
        return ("swizzled",)
    blocks = (fields.activations, fields.wgrad_dy, fields.wgrad_x)
    by_128 = all(block.endswith("x128") or block.startswith("128x") for block in blocks)
    fp8 = gpu == "sm90" or (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0))
    # In blocks of 128, Hopper's GEMM reads plain scales and quads, but not swizzled ones.
    swizzles = () if fp8 and by_128 else ("swizzled",)
    return ("plain", *swizzles, *(("quads",) if by_128 else ()))


@pytest.mark.parametrize("gpu", ["", "sm90", "sm100"])
@pytest.mark.parametrize("recipe", moxie.recipe_names())
def test_padding_of_any_operand_changes_no_result_of_a_pass(recipe, gpu, device):
    if gpu and device != "cpu":
        pytest.skip("stands for a GPU that is not there")
    offs = sizes_to_offs(SIZES, device)
    x, dy = (values(ROWS, cols, device=device, seed=cols) for cols in (K, N))
    for t in (x, dy):
        t[ROWS - TAIL :] = 0
    w, bias = values(len(SIZES), N, K, device=device, seed=1), values(len(SIZES), N, device=device, seed=2)
    with on(gpu):
        for layout in layouts(recipe, gpu):
            for dtype in (torch.bfloat16, torch.float32):
                args = (recipe, x, dy, w, bias, offs, layout, dtype)
                expected, actual = passes(*args, lambda t: t), passes(*args, soiled)
                for name, a, e in zip(("y", "dx", "dw", "main_grad"), actual, expected, strict=True):
                    assert e.isfinite().all()
                    assert_same_bytes(a, e, f"{layout} {dtype} {name}")


@pytest.mark.parametrize("layout", ["plain", "swizzled"])
@pytest.mark.parametrize("block", ["32x1", "128x1", "128x32"])
def test_padding_changes_nothing_that_is_decoded(block, layout, device):
    offs = sizes_to_offs(SIZES, device)
    x = values(ROWS, K, device=device, seed=3)
    form = moxie.quantize_colwise(x, offs=offs, block=block, scale_layout=layout)
    how = {"offs": offs, "block": block, "scale_layout": layout}
    assert_same_bytes(moxie.dequantize_colwise(*map(soiled, form), ROWS, **how), moxie.dequantize_colwise(*form, ROWS, **how))


@pytest.mark.parametrize("recipe", moxie.recipe_names())
def test_a_pass_leaves_the_padding_of_its_operands_as_it_is(recipe, device):
    offs, seen = sizes_to_offs(SIZES, device), []
    x, dy, w = (values(*shape, device=device, seed=4) for shape in ((ROWS, K), (ROWS, N), (len(SIZES), N, K)))

    def remember(tensor):
        seen.append((soiled(tensor),))
        seen[-1] += (seen[-1][0].clone(),)
        return seen[-1][0]

    passes(recipe, x, dy, w, None, offs, "plain", torch.bfloat16, remember)
    for now, before in seen:
        assert_same_bytes(now, before)
