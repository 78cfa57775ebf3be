"""Measures how well a recipe represents a tensor. Results stay on the device, so nothing waits for them."""

from typing import Literal

import torch
from torch import Tensor

from moxie.recipe import DEFAULT_RECIPE, AnyRecipe

_ops = torch.ops.moxie

# The five sums that quantization_stats returns for an operand, in this order; its docstring defines them.
STATS = ("signal", "noise", "flushed", "clipped", "count")

# The operands of the three passes: x and w in forward, dy and w_t in dgrad, dy_t and x_t in wgrad.
PARTS = ("x", "w", "x_t", "w_t", "dy", "dy_t")

Part = Literal["x", "w", "x_t", "w_t", "dy", "dy_t"]


def quantization_stats(
    x: Tensor,
    offs: Tensor | None = None,
    *,
    recipe: AnyRecipe = DEFAULT_RECIPE,
    part: Part | None = None,
) -> Tensor:
    """Returns five sums in f64: the squares of x, the squares of its quantization error, and the numbers of elements that became
    0, that were clipped at 448, and that were counted.

    `part` says which operand of a product x is: x, w or dy in the rowwise form, or x_t, w_t or dy_t in the colwise form, whose
    blocks start anew at each group of `offs`. By default tokens [R, C] are taken for x and weights [G, N, K] for w. The results
    of several calls can be added.

    >>> stats = moxie.quantization_stats(torch.randn(64, 128), recipe="mxfp8_rceil")
    >>> bool(25 < moxie.sqnr(stats) < 40)
    True
    """
    return _ops.quantization_stats(x, offs, recipe=str(recipe), part=part)


def sqnr(stats: Tensor) -> Tensor:
    """The signal-to-noise ratio in dB of each row of five sums, [.., 5] -> [..]. Infinite if the error is zero.

    >>> moxie.sqnr(torch.tensor([[100.0, 1.0, 0.0, 0.0, 10.0], [100.0, 0.0, 0.0, 0.0, 10.0]])).tolist()
    [20.0, inf]
    """
    signal, noise = stats[..., 0], stats[..., 1]
    return torch.where(noise == 0, torch.inf, 10 * torch.log10(signal / noise))
