"""Hopper's path for one scale per row (fp8_rowwise), tested on a CPU: a stand-in for torch's grouped product decodes the
operands.

The replacement checks what torch checks (shapes, strides, alignment, the ends of groups), and writes NaN where torch's kernel may
write nothing: rows past the last group, and results of empty groups.
"""

import pytest
import torch

import moxie
from grouped_reference import Problem, assert_products_equal, gaussian, pretended_gpu, run, straight_through
from support import assert_same_bytes

RECIPE = "fp8_rowwise"
SIZES = [37, 0, 160, 5, 128]


def stand_in(calls, a, b, scale_a, scale_b, offs=None, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False):
    calls.append(b.dim())
    assert a.dtype == b.dtype == torch.float8_e4m3fn and scale_a.dtype == scale_b.dtype == torch.float32
    assert a.is_contiguous() and b.mT.is_contiguous() and scale_a.is_contiguous() and scale_b.is_contiguous()
    assert a.data_ptr() % 16 == b.data_ptr() % 16 == 0
    assert a.shape[-1] % 16 == b.shape[-2] % 16 == b.shape[-1] % 16 == 0
    assert offs.dtype == torch.int32 and bias is None and scale_result is None and out_dtype == torch.bfloat16
    assert not use_fast_accum, "sums are in f32"
    assert a.dim() == 2 and a.shape[1] == b.shape[-2] and len(offs) < 1024
    ends = offs.tolist()
    groups = list(zip([0, *ends], ends))
    assert all(begin <= end for begin, end in groups)
    product = rows_times_weights if b.dim() == 3 else rows_contracted
    return product(a.float(), b.float(), scale_a, scale_b, groups)


def scaled(a, b, scale_a, scale_b):
    return ((a @ b) * scale_a[:, None] * scale_b).bfloat16()


def rows_times_weights(a, b, scale_a, scale_b, groups):
    assert len(groups) == len(b) and scale_a.shape == (len(a),) and scale_b.shape == (len(b), b.shape[2])
    assert groups[-1][1] <= len(a)
    out = torch.full((len(a), b.shape[2]), torch.nan, dtype=torch.bfloat16)
    for g, (begin, end) in enumerate(groups):
        out[begin:end] = scaled(a[begin:end], b[g], scale_a[begin:end], scale_b[g])
    return out


def rows_contracted(a, b, scale_a, scale_b, groups):
    (n, total), k = a.shape, b.shape[1]
    assert scale_a.shape == (len(groups) * n,) and scale_b.shape == (len(groups) * k,)
    assert groups[-1][1] <= total
    out = torch.full((len(groups), n, k), torch.nan, dtype=torch.bfloat16)
    for g, (begin, end) in enumerate(groups):
        assert begin % 16 == end % 16 == 0, "a group begins at 16 bytes"
        if begin < end:
            out[g] = scaled(a[:, begin:end], b[begin:end], scale_a[g * n :][:n], scale_b[g * k :][:k])
    return out


@pytest.fixture
def sm90_rows():
    """Plans every fp8_rowwise call as for a Hopper GPU. Yields a list to which each product appends the number of dims of its
    second operand."""
    with pretended_gpu("sm90", stand_in) as calls:
        yield calls


def emulated(problem: Problem, **kwargs):
    return run(problem, "fp8_rowwise:kernels=emulated", **kwargs)


@pytest.mark.parametrize(
    "sizes, tail",
    ((SIZES, 9), ([2000, 0, 1900], 3), ([300], 0), ([0, 0, 7], 0), ([0, 0, 0], 5), ([32] * 40, 0), ([1] * 33, 100)),
    ids=str,
)
def test_the_three_passes_are_straight_through(sizes, tail, sm90_rows):
    problem = gaussian(sizes, 160, 96, tail=tail)
    # Gives neighbouring rows and columns different scales, so that reading a wrong scale changes the result.
    problem.x *= torch.exp2(torch.randint(-9, 10, (len(problem.x), 1))).bfloat16()
    problem.w *= torch.exp2(torch.randint(-9, 10, (*problem.w.shape[:2], 1))).bfloat16()
    problem.dy *= torch.exp2(torch.randint(-9, 10, (1, 160))).bfloat16()
    results = run(problem, RECIPE)
    assert sm90_rows == [3, 3, 2], "forward, dgrad and wgrad go through it"
    expected, magnitude = straight_through(problem, RECIPE)
    for name in ("y", "dx", "dw"):
        assert_products_equal(getattr(results, name), getattr(expected, name), getattr(magnitude, name), name)
    assert not results.y[sum(sizes) :].any() and not results.dx[sum(sizes) :].any()
    for g, size in enumerate(sizes):
        assert size or not results.dw[g].any()


def test_garbage_past_the_groups_changes_nothing(sm90_rows):
    problem = gaussian(SIZES, 64, 96, tail=40)
    dirty = Problem(problem.x.clone(), problem.w, problem.dy.clone(), problem.offs)
    dirty.x[330:], dirty.dy[330:] = torch.nan, torch.inf
    for actual, expected in zip(run(dirty, RECIPE), run(problem, RECIPE)):
        assert_same_bytes(actual, expected)


def test_nan_stays_in_its_row_and_in_its_expert(sm90_rows):
    problem = gaussian(SIZES, 64, 96, tail=4)
    problem.x[40, 3] = torch.nan  # row 40 belongs to the third expert
    results = run(problem, RECIPE)
    assert results.y.isnan().any(1).nonzero().tolist() == [[40]] and not results.dx.isnan().any()
    assert results.dw.isnan().any(2).any(1).tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("bias", ("n", "gn"))
def test_a_bias_is_added_to_the_rows_of_groups_alone(bias, sm90_rows):
    problem = gaussian(SIZES, 64, 96, tail=40, bias=bias)
    results, expected = run(problem, RECIPE), emulated(problem)
    # On this path the product is rounded to bf16 before the bias is added, so y is rounded twice.
    torch.testing.assert_close(results.y, expected.y, rtol=2.0**-7, atol=2.0**-4)
    assert not results.y[330:].any()
    assert_same_bytes(results.dbias, expected.dbias)


def test_without_offs_there_is_one_group(sm90_rows):
    problem = gaussian([100], 64, 96)
    expected = run(problem, RECIPE)
    problem.offs = None
    for actual, wanted in zip(run(problem, RECIPE), expected):
        assert_same_bytes(actual, wanted)
    assert sm90_rows == [3, 3, 2] * 2


def test_a_pass_with_f32_results_is_emulated(sm90_rows):
    problem = gaussian(SIZES, 64, 96, w_dtype=torch.float32)
    results = run(problem, RECIPE)
    assert sm90_rows == [3, 3], "dw has the dtype of w"
    assert_same_bytes(results.dw, emulated(problem).dw)
    main_grad = torch.zeros(problem.w.shape)
    run(problem, RECIPE, main_grad=main_grad)
    assert_same_bytes(main_grad, results.dw)
    sm90_rows.clear()
    f32 = gaussian(SIZES, 64, 96, dtype=torch.float32)
    for actual, expected in zip(run(f32, RECIPE), emulated(f32)):
        assert_same_bytes(actual, expected)
    assert sm90_rows == []


def test_no_rows_are_not_multiplied(sm90_rows):
    results = run(gaussian([0, 0], 64, 96), RECIPE)
    assert sm90_rows == [] and not results.dw.any()


def test_operands_at_odd_addresses_are_copied_first(sm90_rows):
    problem = gaussian(SIZES, 64, 96)
    (x, x_scale), (w, w_scale, _, _) = moxie.quantize_per_row(problem.x), moxie.quantize_weights(problem.w, recipe=RECIPE)
    multiply = lambda x: moxie.grouped_fwd(x, x_scale, w, w_scale, problem.offs, recipe=RECIPE)
    expected = multiply(x)
    odd = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    odd.copy_(x)
    sm90_rows.clear()
    assert_same_bytes(multiply(odd), expected)
    assert sm90_rows == [3]


def test_a_cache_gives_the_same_results(sm90_rows):
    problem = gaussian(SIZES, 64, 96)
    cache = moxie.WeightCache(problem.w, recipe=RECIPE)
    for actual, expected in zip(run(problem, RECIPE, quantized_w=cache), run(problem, RECIPE)):
        assert_same_bytes(actual, expected)


def test_wgrad_with_hp_keeps_wgrad_off_the_path(sm90_rows):
    problem = gaussian(SIZES, 64, 96)
    results = run(problem, "fp8_rowwise:wgrad_with_hp=true")
    assert sm90_rows == [3, 3]
    assert_same_bytes(results.dw, run(problem, "fp8_rowwise:wgrad_with_hp=true,kernels=emulated").dw)


def test_other_recipes_do_not_take_the_path(sm90_rows):
    problem = gaussian(SIZES, 64, 96)
    for recipe in ("mxfp8_rceil_128", "mxfp8_rceil", "fp8_rowwise:kernels=emulated", "bf16"):
        run(problem, recipe)
    assert sm90_rows == []
