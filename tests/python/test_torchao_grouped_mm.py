"""Compares y, dx and dw with torchao 0.18's emulated MXFP8 grouped product, the oracle.

Groups are multiples of 32 rows and none is empty, because the oracle lets blocks straddle other groups and leaves the
gradient of an expert without tokens undefined. Its operands are those of our 1x32 recipes, bit for bit, so only the order of
summation and the rounding to bf16 differ.
"""

import random

import pytest
import torch

import moxie
from grouped_reference import Problem, Results, gaussian, run, sqnr

pytest.importorskip("torchao", reason="torchao, the oracle, is not installed")

from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

SHAPES = 60


def oracle(problem: Problem, rule: str, wgrad_with_hp: bool = False) -> Results:
    x, w = problem.x.detach().requires_grad_(), problem.w.detach().requires_grad_()
    y = _to_mxfp8_then_scaled_grouped_mm(
        x,
        w.transpose(-2, -1),
        offs=problem.offs,
        out_dtype=torch.bfloat16,
        kernel_preference=KernelPreference.EMULATED,
        wgrad_with_hp=wgrad_with_hp,
        scale_calculation_mode=ScaleCalculationMode(rule),
    )
    y.backward(problem.dy)
    return Results(y.detach(), x.grad, w.grad)


def random_problem(seed: int) -> Problem:
    rng = random.Random(seed)
    groups = rng.choice((1, 2, 3, 5, 8, 13))
    sizes = [32 * rng.randint(1, 6) for _ in range(groups)]
    n, k = 32 * rng.randint(1, 8), 32 * rng.randint(1, 8)
    problem = gaussian(sizes, n, k, seed=seed)
    # Make one channel of x and one of dy large, like the outlier channels of real activations and gradients.
    problem.x[:, rng.randrange(k)] *= 50
    problem.dy[:, rng.randrange(n)] *= 50
    return problem


def assert_60_db(actual: Results, expected: Results) -> None:
    for name, *pair in zip(("y", "dx", "dw"), actual, expected):
        assert sqnr(*pair) >= 60, name


@pytest.mark.parametrize("recipe, rule", (("mxfp8_rceil", "rceil"), ("mxfp8_floor", "floor")))
@pytest.mark.parametrize("seed", range(SHAPES))
def test_mxfp8_is_60_db_from_the_oracle(seed, recipe, rule, device):
    problem = random_problem(seed)
    assert_60_db(run(problem.on(device), recipe), oracle(problem, rule).on(device))


@pytest.mark.parametrize("rule", ("rceil", "floor", "ceil", "even"))
@pytest.mark.parametrize("seed", range(5))
def test_the_emulated_recipes_are_60_db_from_the_oracle(seed, rule, device):
    problem = random_problem(1000 + seed)
    assert_60_db(run(problem.on(device), f"mxfp8_emulated_{rule}"), oracle(problem, rule).on(device))


@pytest.mark.parametrize("rule", ("rceil", "ceil"))
@pytest.mark.parametrize("seed", range(5))
def test_dw_of_an_x_that_came_quantized_is_60_db_from_the_oracle(seed, rule, device):
    """wgrad quantizes x a second time. Under rules that clip nothing, an element keeps its bits unless it becomes subnormal."""
    problem = random_problem(3000 + seed)
    w = problem.w.to(device).requires_grad_()
    x = moxie.MXTensor.to_mx(problem.x.to(device), block="1x32", rule=rule)
    moxie.grouped_mm(x, w, problem.offs.to(device), recipe=f"mxfp8_emulated_{rule}").backward(problem.dy.to(device))
    assert sqnr(w.grad, oracle(problem, rule).dw.to(device)) >= 60


@pytest.mark.parametrize("seed", range(5))
def test_wgrad_with_hp_is_60_db_from_the_oracle(seed, device):
    problem = random_problem(2000 + seed)
    expected = oracle(problem, "rceil", wgrad_with_hp=True).on(device)
    assert_60_db(run(problem.on(device), "mxfp8_rceil_wgrad_with_hp"), expected)


def test_the_oracle_is_not_60_db_from_bf16():
    """Shows that 60 dB is a strict bound: unquantized results are less than 40 dB from the oracle's."""
    problem = random_problem(0)
    assert all(sqnr(*pair) < 40 for pair in zip(run(problem, "bf16"), oracle(problem, "rceil")))
