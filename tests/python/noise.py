"""How far apart two computations of one thing may be where a sum or an exponential is the machine's own.

Differences are relative norms. Numbers that are d apart and are rounded to steps of s (both relative) come out s apart with the
probability d / s, and else equal: their mean square is s * d. A product then spreads those few differences over all its results,
which are rounded again.
"""

import math

import torch

BF16_STEP = 2.0**-7  # the largest: 2^-8 just below a power of two
E4M3_STEP = 2.0**-3


def rounded(difference: float, *steps: float, count: int) -> float:
    """What a difference becomes when `count` values are rounded to each of these steps before the next product.

    So few of them may be expected to move that one alone is more: four, twice as large as the others, are let through.
    """
    few = 4 * 2**2 * sum(step**2 for step in steps) / count
    return math.sqrt(difference**2 + difference * sum(steps) + few)


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.double().cpu(), expected.double().cpu()
    return ((actual - expected).norm() / expected.norm()).item()
