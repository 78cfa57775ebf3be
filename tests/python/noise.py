"""Derived tolerances for comparing two computations of the same result on different machines, whose sums and exponentials round
differently.

Differences are relative norms. If two numbers differ by d and are rounded to steps of s (both relative), the rounded numbers
differ by s with probability d / s and are equal otherwise, so their mean square difference is s * d. A following product spreads
these differences over all its results, which are then rounded in turn.
"""

import math

import torch

BF16_STEP = 2.0**-7  # bf16's largest relative step, which occurs just above a power of two; just below one the step is 2^-8
E4M3_STEP = 2.0**-3


def rounded(difference: float, *steps: float, count: int) -> float:
    """Returns the relative difference that two results have after `count` values were rounded to each of these steps in turn,
    with a product after each.

    If fewer than one value is expected to round differently, a single one already exceeds the mean. The result therefore always
    allows for four such values, each twice as large as the others.
    """
    few = 4 * 2**2 * sum(step**2 for step in steps) / count
    return math.sqrt(difference**2 + difference * sum(steps) + few)


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.double().cpu(), expected.double().cpu()
    return ((actual - expected).norm() / expected.norm()).item()
