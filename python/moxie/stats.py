"""Measures how well a recipe represents a tensor. Results stay on the device, so nothing waits for them."""

from typing import Literal

import torch
from torch import Tensor

from moxie.recipe import DEFAULT_RECIPE, AnyRecipe

_ops = torch.ops.moxie

# The sums over an operand, in order.
STATS = ("signal", "noise", "flushed", "clipped", "count")

# The operands of a product: those of forward, the transposed forms that wgrad and dgrad contract, and the gradient, for dgrad
# and for wgrad.
PARTS = ("x", "w", "x_t", "w_t", "dy", "dy_t")

Part = Literal["x", "w", "x_t", "w_t", "dy", "dy_t"]


def quantization_stats(
    x: Tensor,
    offs: Tensor | None = None,
    *,
    recipe: AnyRecipe = DEFAULT_RECIPE,
    part: Part | None = None,
) -> Tensor:
    """f64 [5]: the energy of x and of its quantization error, elements that became 0, elements clipped at 448, elements in all.

    `part` says which operand of a product x is: x, w or dy; x_t, w_t or dy_t in the form contracted over rows, whose blocks
    start again at each group of `offs`. Without it, tokens [R, C] are x and weights [G, N, K] are w. Results of several
    calls can be added.

    >>> stats = moxie.quantization_stats(torch.randn(64, 128), recipe="mxfp8_rceil")
    >>> bool(25 < moxie.sqnr(stats) < 40)
    True
    """
    return _ops.quantization_stats(x, offs, recipe=str(recipe), part=part)


def sqnr(stats: Tensor) -> Tensor:
    """Signal to noise in dB, [.., 5] -> [..], on the device. Infinite where nothing is lost.

    >>> moxie.sqnr(torch.tensor([[100.0, 1.0, 0.0, 0.0, 10.0], [100.0, 0.0, 0.0, 0.0, 10.0]])).tolist()
    [20.0, inf]
    """
    signal, noise = stats[..., 0], stats[..., 1]
    return torch.where(noise == 0, torch.inf, 10 * torch.log10(signal / noise))
