"""How well a recipe represents a tensor, as a few numbers on its device: nothing waits for them until they are read."""

import math

import torch
from torch import Tensor

from moxie import ops
from moxie.recipe import AnyRecipe, Recipe

# What quantization_stats counts, in order.
STATS = ("signal", "noise", "flushed", "clipped", "count")


@torch.no_grad()
def quantization_stats(x: Tensor, *, recipe: AnyRecipe) -> Tensor:
    """f64 [5]: the energy of x and of its quantization error, elements that became 0, elements clipped at 448, elements in all.

    x is tokens [R, C], in the block of activations, or weights [G, N, K], in that of weights. Sums of several calls can be added.

    >>> stats = moxie.quantization_stats(torch.randn(64, 128), recipe="mxfp8_rceil")
    >>> 25 < moxie.sqnr(stats) < 40
    True
    """
    if isinstance(recipe, str):
        recipe = Recipe.from_name(recipe)
    if recipe.scaling == "none":
        qdata, decoded = None, x.to(torch.bfloat16).float()
    elif recipe.scaling == "row":
        qdata, scale = ops.quantize_per_row(x)
        decoded = qdata.float() * scale.unsqueeze(-1)
    else:
        block = recipe.weights if x.dim() == 3 else recipe.activations
        qdata, scale = ops.quantize_rowwise(x, block=block, rule=recipe.rule)
        decoded = ops.dequantize_rowwise(qdata, scale, block=block, dtype=torch.float32)
    wide = x.float()
    flushed = ((wide != 0) & (decoded == 0)).sum()
    clipped = torch.zeros((), device=x.device)
    if qdata is not None:
        at_limit = (qdata.view(torch.uint8) & 0x7F) == 0x7E
        clipped = (at_limit & (wide.abs() > decoded.abs() * (464 / 448))).sum()  # past half a step above 448
    energy = lambda t: t.double().square().sum()  # noqa: E731
    count = torch.full((), x.numel(), device=x.device)
    return torch.stack([energy(wide), energy(wide - decoded), flushed.double(), clipped.double(), count.double()])


def sqnr(stats: Tensor) -> float:
    """Signal to noise in dB; this reads the numbers, and so waits for them.

    >>> moxie.sqnr(torch.tensor([100.0, 1.0, 0.0, 0.0, 10.0]))
    20.0
    """
    signal, noise = stats[:2].tolist()
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf
