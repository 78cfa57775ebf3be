"""grouped_mm: the numerics of every recipe, group sizes, and arguments that must not change the result."""

import contextlib
import itertools
import math
import random

import pytest
import torch

import moxie
from grouped_reference import (
    Problem,
    assert_products_equal,
    assert_straight_through,
    bounds,
    gaussian,
    run,
    sqnr,
    straight_through,
)
from support import COLWISE_BLOCKS, ROWWISE_BLOCKS, RULES, assert_same_bytes, ragged_offs, random_values, sizes_to_offs

RECIPES = moxie.recipe_names()
QUANTIZED = [name for name in RECIPES if name != "bf16"]
MXFP8 = [name for name in RECIPES if name.startswith("mxfp8")]
RAGGED = [37, 0, 64, 5, 120]


def assert_same_results(actual, expected, what: str = "") -> None:
    for name, *pair in zip(("y", "dx", "dw"), actual, expected):
        assert_same_bytes(*pair, f"{what} {name}")


@contextlib.contextmanager
def poisoned_allocations():
    """Fills newly allocated memory with NaN, so that elements an op does not write are noticed."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(4).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


# ---- numerics --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", (None, "n", "gn"), ids=str)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_straight_through_its_quantizers(recipe, dtype, bias, device):
    problem = gaussian(RAGGED, 72, 160, tail=9, dtype=dtype, bias=bias, device=device)
    results = assert_straight_through(problem, recipe)
    assert [t.dtype for t in results] == [dtype] * 3
    if bias:
        assert results.dbias.dtype == dtype and results.dbias.shape == problem.bias.shape


@pytest.mark.parametrize("seed", range(40))
def test_random_shapes_are_straight_through(seed, device):
    rng = random.Random(seed)
    rows, groups = rng.choice([rng.randint(1, 300), 64 * rng.randint(1, 8)]), rng.randint(1, 9)
    size = lambda: rng.choice([rng.randint(1, 200), 32 * rng.randint(1, 6), 128])
    n, k = size(), size()
    dtypes = [rng.choice([torch.bfloat16, torch.float32]) for _ in range(2)]
    problem = gaussian(
        [rows] + [0] * (groups - 1), n, k, dtype=dtypes[0], w_dtype=dtypes[1], seed=seed, bias=rng.choice([None, "n", "gn"])
    )
    # Magnitudes that differ between rows, and zeros, so that scales of every size occur.
    problem.x = random_values(rows, k, dtype=dtypes[0], seed=seed)
    problem.offs = ragged_offs(rows, groups, rng)
    assert_straight_through(problem.on(device), rng.choice(RECIPES))


def legal_recipes() -> list[moxie.Recipe]:
    """Returns recipes with every legal combination of blocks, once each. The four rules take turns."""
    pairs = [pair for pair in itertools.product(COLWISE_BLOCKS, repeat=2) if pair[0].split("x")[0] == pair[1].split("x")[0]]
    rules = itertools.cycle(RULES)
    return [
        moxie.Recipe(rule=next(rules), activations=activations, weights=weights, wgrad_dy=dy, wgrad_x=x)
        for activations, weights, (dy, x) in itertools.product(("1x32", "1x128"), ROWWISE_BLOCKS, pairs)
    ]


@pytest.mark.parametrize("weights", ROWWISE_BLOCKS)
def test_every_legal_combination_of_blocks_is_straight_through(weights, device):
    problem = gaussian([37, 0, 150, 5], 72, 136, tail=3, device=device, dtype=torch.float32)
    recipes = [recipe for recipe in legal_recipes() if recipe.weights == weights]
    assert len(recipes) == 2 * 13
    for recipe in recipes:
        assert_straight_through(problem, recipe)


@pytest.mark.parametrize("out", ("input", "bfloat16", "float32"))
@pytest.mark.parametrize("kernels", ("auto", "emulated"))
@pytest.mark.parametrize("hp", (False, True))
def test_the_other_fields_combine_with_every_scaling(hp, kernels, out, device):
    for dtype in (torch.bfloat16, torch.float32):
        problem = gaussian(RAGGED, 72, 160, tail=9, dtype=dtype, device=device)
        for recipe in (
            moxie.Recipe(wgrad_with_hp=hp, kernels=kernels, out=out),
            moxie.Recipe("row", wgrad_with_hp=hp, kernels=kernels, out=out),
            *([] if hp else [moxie.Recipe("none", kernels=kernels, out=out)]),
        ):
            results = assert_straight_through(problem, recipe)
            assert results.y.dtype == (dtype if out == "input" else getattr(torch, out))
            assert results.dx.dtype == results.dw.dtype == dtype


# The smallest allowed SQNR in dB of y, dx and dw on Gaussian data. docs/RECIPES.md has the measured values.
FLOORS = {
    "mxfp8_rceil": (28.0, 28.0, 28.0),
    "mxfp8_rceil_32x32": (28.0, 28.0, 28.0),
    "mxfp8_rceil_128": (28.0, 28.0, 28.0),
    "mxfp8_emulated_rceil": (28.0, 28.0, 28.0),
    "mxfp8_rceil_wgrad_with_hp": (28.0, 28.0, 60.0),
    "mxfp8_floor": (27.2, 27.2, 27.2),
    "mxfp8_emulated_floor": (27.2, 27.2, 27.2),
    "mxfp8_emulated_ceil": (28.0, 28.0, 28.0),
    "mxfp8_emulated_even": (27.2, 27.2, 27.2),
    "fp8_rowwise": (25.0, 24.0, 23.0),
}


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_noise_against_bf16_on_gaussian_data_is_bounded(recipe, device):
    problem = gaussian([300, 0, 1, 467, 256], 256, 512, device=device)
    actual, expected = run(problem, recipe), run(problem, "bf16")
    for name, floor, *pair in zip(("y", "dx", "dw"), FLOORS[recipe], actual, expected):
        assert sqnr(*pair) >= floor, name


def test_weights_are_quantized_from_f32_not_through_bf16(device):
    problem = gaussian([40, 60], 64, 128, dtype=torch.bfloat16, w_dtype=torch.float32, device=device)
    for recipe in ("mxfp8_rceil", "fp8_rowwise", "mxfp8_rceil_128"):
        actual = assert_straight_through(problem, recipe, dtype=torch.float32)
        rounded = Problem(problem.x, problem.w.bfloat16(), problem.dy, problem.offs)
        other, magnitude = straight_through(rounded, recipe, torch.float32)
        with pytest.raises(AssertionError):
            assert_products_equal(actual.y, other.y, magnitude.y)
        assert actual.dw.dtype == torch.float32


def test_an_f32_result_of_bf16_inputs_keeps_the_bits_that_bf16_drops(device):
    problem = gaussian([40, 60], 64, 128, device=device)
    y32 = assert_straight_through(problem, "mxfp8_rceil", dtype=torch.float32).y
    y16 = assert_straight_through(problem, "mxfp8_rceil", dtype=torch.bfloat16).y
    assert y32.dtype == torch.float32 and y16.dtype == torch.bfloat16
    assert (y32 != y32.bfloat16().float()).any()
    assert run(problem, "mxfp8_rceil:out=bfloat16", dtype=torch.float32).y.dtype == torch.float32  # overrides the recipe


# ---- groups ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_is_left_uninitialised(recipe, device):
    """Gradients of experts without tokens, and rows that are in no group, must be zeros and not what the memory held before."""
    problem = gaussian([0, 37, 0, 64, 0], 72, 160, tail=40, device=device, bias="gn")
    with poisoned_allocations():
        results = run(problem, recipe)
    for g in (0, 2, 4):
        assert not results.dw[g].any() and not results.dbias[g].any()
    assert not results.y[101:].any() and not results.dx[101:].any()
    assert all(t.isfinite().all() for t in (*results, results.dbias))
    assert_same_results(results, run(problem, recipe))


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_groups_may_be_empty(recipe, device):
    for tail in (0, 50):
        problem = gaussian([0, 0, 0], 64, 96, tail=tail, device=device)
        results = run(problem, recipe)
        assert results.y.shape == (tail, 64) and results.dx.shape == (tail, 96)
        assert not any(t.any() for t in results)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_group_is_the_product_of_its_rows_alone(recipe, device):
    """Each group's results equal those of multiplying it alone: no block, scale or row of a group affects another, even if
    unaligned."""
    problem = gaussian([37, 1, 64, 31, 129], 64, 96, dtype=torch.float32, device=device)
    together = run(problem, recipe)
    for g, (begin, end) in enumerate(bounds(problem)):
        rows = slice(begin, end)
        alone = Problem(problem.x[rows], problem.w[g : g + 1], problem.dy[rows], None)
        alone_results = run(alone, recipe)
        _, magnitude = straight_through(alone, recipe, torch.float32)
        assert_products_equal(together.y[rows], alone_results.y, magnitude.y, "y")
        assert_products_equal(together.dx[rows], alone_results.dx, magnitude.dx, "dx")
        assert_products_equal(together.dw[g], alone_results.dw[0], magnitude.dw[0], "dw")


@pytest.mark.parametrize("groups", (3, 33, 100, 1024))
def test_any_number_of_groups_works(groups, device):
    sizes = [(g * 7) % 5 * (g % 3) for g in range(groups)]
    problem = gaussian(sizes, 40, 48, tail=5, device=device, bias="gn")
    for recipe in ("mxfp8_rceil", "mxfp8_rceil_128", "fp8_rowwise", "bf16"):
        assert_straight_through(problem, recipe)


def test_without_offs_all_rows_are_one_group(device):
    problem = gaussian([100], 64, 96, device=device)
    for recipe in RECIPES:
        alone = run(Problem(problem.x, problem.w, problem.dy, None), recipe)
        if device == "cpu":
            assert_same_results(alone, run(problem, recipe), recipe)
        else:  # a GPU multiplies a single group with another kernel of torch, which sums in another order
            expected, magnitude = straight_through(problem, recipe, alone.y.dtype)
            for name in ("y", "dx", "dw"):
                assert_products_equal(getattr(alone, name), getattr(expected, name), getattr(magnitude, name), name)


@pytest.mark.parametrize("n, k", ((1, 1), (1, 200), (33, 31), (40, 70), (8, 16)))
def test_sizes_need_not_be_multiples_of_a_block(n, k, device):
    problem = gaussian(RAGGED, n, k, tail=2, device=device)
    for recipe in RECIPES:
        assert_straight_through(problem, recipe)


@pytest.mark.parametrize("shape", ((0, 8, 16), (10, 0, 16), (10, 8, 0)), ids=str)
def test_empty_sizes_give_empty_or_zero_results(shape, device):
    rows, n, k = shape
    problem = gaussian([rows // 2, 0], n, k, tail=rows - rows // 2, device=device)
    for recipe in RECIPES:
        with poisoned_allocations():
            results = run(problem, recipe)
        assert [tuple(t.shape) for t in results] == [(rows, n), (rows, k), (2, n, k)]
        assert not any(t.any() for t in results)


# ---- inputs that must not change the result --------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", (math.nan, math.inf, 3e38), ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_past_the_last_group_change_nothing(recipe, garbage, device):
    problem = gaussian([40, 0, 61], 64, 96, tail=40, device=device, bias="n")
    dirty = Problem(problem.x.clone(), problem.w, problem.dy.clone(), problem.offs, problem.bias)
    dirty.x[101:] = garbage
    dirty.dy[101:] = garbage
    expected, actual = run(problem, recipe), run(dirty, recipe)
    assert_same_results(actual, expected)
    assert_same_bytes(actual.dbias, expected.dbias)
    assert not actual.y[101:].any() and not actual.dx[101:].any()


@pytest.mark.parametrize("bad", (math.nan, math.inf), ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_nan_of_a_row_stays_in_its_row_and_its_expert(recipe, bad, device):
    problem = gaussian([40, 0, 61, 20], 64, 96, tail=3, device=device)
    clean = run(problem, recipe)
    for where in ("x", "dy"):
        dirty = Problem(problem.x.clone(), problem.w, problem.dy.clone(), problem.offs)
        getattr(dirty, where)[50, 7] = bad
        results = run(dirty, recipe)
        touched, untouched = (results.y, results.dx) if where == "x" else (results.dx, results.y)
        assert not touched[50].isfinite().any() if recipe != "bf16" else not touched[50].isfinite().all()
        others = torch.arange(124, device=device) != 50
        expected_touched, expected_untouched = (clean.y, clean.dx) if where == "x" else (clean.dx, clean.y)
        assert_same_bytes(touched[others], expected_touched[others], where)
        assert_same_bytes(untouched, expected_untouched, where)
        assert not results.dw[2].isfinite().all()
        for g in (0, 1, 3):
            assert_same_bytes(results.dw[g], clean.dw[g], f"{where}, expert {g}")


@pytest.mark.parametrize("recipe", RECIPES)
def test_strided_inputs_and_gradients_give_the_same_bytes(recipe, device):
    problem = gaussian(RAGGED, 72, 160, tail=9, device=device, bias="gn")
    apart = lambda t: torch.stack([t, t], -1)[..., 1]
    transposed = lambda t: t.mT.contiguous().mT
    expected = run(problem, recipe)
    for change in (apart, transposed):
        strided = Problem(*(change(t) for t in (problem.x, problem.w, problem.dy)), problem.offs, change(problem.bias))
        assert not strided.w.is_contiguous()
        actual = run(strided, recipe)
        assert_same_results(actual, expected)
        assert_same_bytes(actual.dbias, expected.dbias)
    strided_offs = Problem(problem.x, problem.w, problem.dy, apart(problem.offs), problem.bias)
    assert_same_results(run(strided_offs, recipe), expected)


@pytest.mark.parametrize("recipe", [*MXFP8, "fp8_rowwise"])
def test_operands_that_are_quantized_already_multiply_alike(recipe, device):
    """Tokens that the caller has quantized give the same bytes in all three passes, so no pass needs a bf16 copy of them."""
    problem = gaussian(RAGGED, 64, 160, device=device)
    fields, offs, rows = moxie.Recipe.from_name(recipe), problem.offs, len(problem.x)
    expected, ops = run(problem, recipe), torch.ops.moxie
    if moxie.explain(recipe, 64, 160, device=device).forward.kernel == "sm100" or fields.wgrad_with_hp:
        pytest.skip("operands in another layout, or not quantized")
    if recipe == "fp8_rowwise":
        x, dy = ([*moxie.quantize_per_row(t, offs=offs), *moxie.quantize_per_col(t, offs=offs)] for t in (problem.x, problem.dy))
    else:
        x, dy = (
            moxie.quantize_both(t, offs=offs, rowwise_block=fields.activations, colwise_block=block, rule=fields.rule)
            for t, block in ((problem.x, fields.wgrad_x), (problem.dy, fields.wgrad_dy))
        )
    w = moxie.quantize_weights(problem.w, recipe=recipe)
    assert_same_bytes(moxie.grouped_fwd(*x[:2], *w[:2], offs, recipe=recipe), expected.y)
    assert_same_bytes(ops.grouped_dgrad(*dy[:2], *w[2:], offs, recipe=recipe), expected.dx)
    assert_same_bytes(ops.grouped_wgrad(*dy[2:], *x[2:], rows, offs, recipe=recipe), expected.dw)


def test_inference_mode_and_no_grad_give_the_same_bytes(device):
    problem = gaussian(RAGGED, 64, 96, device=device, bias="n")
    for recipe in RECIPES:
        expected = run(problem, recipe).y
        for without_grad in (torch.no_grad, torch.inference_mode):
            with without_grad():
                y = moxie.grouped_mm(problem.x, problem.w, problem.offs, recipe=recipe, bias=problem.bias)
            assert_same_bytes(y, expected, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_large_products_are_cut_into_panels_and_give_the_same(recipe, device):
    """A CPU decodes at most 1024 rows of an operand at a time. In the first problem x and w have more rows than that. In the
    second only K is above 1024, which is the number of rows of w_t in dgrad."""
    problem = gaussian([1100, 0, 1030], 1056, 32, tail=7, device=device)
    assert_straight_through(problem, recipe)
    wide = gaussian([17, 30], 16, 1100, device=device)
    assert_straight_through(wide, recipe)


def test_the_number_of_threads_changes_no_more_than_the_order_of_summation():
    problem = gaussian([700, 0, 900], 64, 96)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for recipe in ("mxfp8_rceil", "mxfp8_rceil_128", "fp8_rowwise"):
            assert_straight_through(problem, recipe)
    finally:
        torch.set_num_threads(before)


def test_offs_may_change_in_place_between_steps(device):
    """The ends of groups may change in place between steps, as when a router writes them into the same tensor each time."""
    problem = gaussian([10, 20, 30], 64, 96, device=device)
    expected = []
    for sizes in ([10, 20, 30], [0, 60, 0], [33, 1, 20]):
        problem.offs = sizes_to_offs(sizes, device)
        expected.append(run(problem))
    offs = problem.offs = sizes_to_offs([10, 20, 30], device)
    for sizes, results in zip(([10, 20, 30], [0, 60, 0], [33, 1, 20]), expected):
        offs.copy_(sizes_to_offs(sizes))
        assert_same_results(run(problem), results)
