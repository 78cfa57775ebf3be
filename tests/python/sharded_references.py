"""Computes in one process what the ranks of a mesh (dp, ep, tp) compute, with the same splits and with sums in f32.

Each rank of dp and ep has its own tokens and its own bf16 copy of what is not an expert. The ranks of an ep group share a copy of
the experts, and tp splits products as it does over ranks. The copies' gradients are added up in f32.
"""

import copy
import dataclasses

import torch
from torch import Tensor, nn

import moxie
import moxie.nn
from sharded_models import D, E, K, gradients, tokens

HIDDEN, SHARED = 256, 128


@dataclasses.dataclass(frozen=True)
class Sizes:
    dp: int = 1
    ep: int = 1
    tp: int = 1

    @property
    def batches(self) -> int:
        return self.dp * self.ep


class Layer(nn.Module):
    """A linear followed by an MoE layer, so that tests also cover the gradients that the experts pass back to their tokens."""

    def __init__(self, recipe: str = "mxfp8_rceil_128", dtype: torch.dtype = torch.float32, **options):
        super().__init__()
        self.up = moxie.MXLinear(D, D, config="mxfp8_rceil", dtype=dtype)
        self.moe = moxie.nn.MoE(D, HIDDEN, E, K, recipe=recipe, dtype=dtype, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.up(x)
        return x + self.moe(x)


def seeded(**options) -> Layer:
    torch.manual_seed(11)
    return Layer(**options)


def loss_of(y: Tensor, batch: int, step: int = 0) -> Tensor:
    return (y.float() - tokens(7 + 100 * step + batch).float()).square().mean()


class _Rounded(torch.autograd.Function):
    """Rounds to FP8 and back, as an exchange in FP8 does: x in forward, or its gradient in backward if `of_gradient`."""

    @staticmethod
    def forward(ctx, x: Tensor, block: str, of_gradient: bool) -> Tensor:
        ctx.block, ctx.of_gradient = block, of_gradient
        return x.clone() if of_gradient else _round(x, block)

    @staticmethod
    def backward(ctx, dy: Tensor):
        return (_round(dy, ctx.block) if ctx.of_gradient else dy), None, None


def _round(x: Tensor, block: str) -> Tensor:
    return moxie.dequantize_rowwise(*moxie.quantize_rowwise(x, block=block), block=block, dtype=x.dtype)


def parts_of(experts: moxie.nn.GroupedExperts, size: int) -> list[tuple[Tensor, Tensor]]:
    """Splits w13 and w2 as tensor parallelism does over `size` ranks. Each part has a share of the gates, of the ups, and of w2's
    columns."""
    gates, ups = experts.w13.chunk(2, 1)
    return [
        (torch.cat(pair, 1), w2)
        for *pair, w2 in zip(gates.chunk(size, 1), ups.chunk(size, 1), experts.w2.chunk(size, 2), strict=True)
    ]


def moe_of_groups(layers: list[moxie.nn.MoE], xs: list[Tensor], tp: int, wire: str | None = None) -> list[Tensor]:
    """Computes the MoE layer of an ep group in one process. xs are the tokens of its ranks, `layers` hold the ranks' routers and
    shared experts. The routed experts are the first layer's, and each of their products is split in `tp` parts."""
    experts = layers[0].experts
    # Views of xs, so that autograd adds up the layer's gradients of x before it adds those of the layer's surroundings, as the
    # ranks do.
    xs = [x.view_as(x) for x in xs]
    routings = [layer.router(x) for layer, x in zip(layers, xs, strict=True)]
    offs, slot_of, row_of = moxie.route(torch.cat([routing.ids for routing in routings]), E)
    weights = torch.cat([routing.weights for routing in routings])
    block = moxie.Recipe.from_name(experts.recipe).activations
    every = torch.cat(xs)
    every = _Rounded.apply(every, block, False) if wire == "fp8" else every
    route = {"slot_of": slot_of, "row_of": row_of, "top_k": K, "weights": weights, "recipe": experts.recipe}
    of_parts = [moxie.expert_mlp(every, w13, w2, offs, **route) for w13, w2 in parts_of(experts, tp)]
    if wire == "fp8":
        of_parts = [_Rounded.apply(y, block, True) for y in of_parts]
    if layers[0].shared is not None:  # as a rank does, add its parts of routed and shared experts before the sum over ranks
        of_shared = [_shared(layer, x, tp) for layer, x in zip(layers, xs, strict=True)]
        of_parts = [y + torch.cat(shared) for y, shared in zip(of_parts, zip(*of_shared, strict=True), strict=True)]
    return list(sum(of_parts[1:], of_parts[0]).chunk(len(xs)))


def _shared(layer: moxie.nn.MoE, x: Tensor, tp: int) -> list[Tensor]:
    x = x.view_as(x)
    return [moxie.expert_mlp(x, w13, w2, recipe=layer.experts.recipe) for w13, w2 in parts_of(layer.shared.experts, tp)]


def _up(linear: moxie.MXLinear, x: Tensor, tp: int) -> Tensor:
    parts = zip(linear.weight.chunk(tp), linear.bias.chunk(tp), strict=True)
    return torch.cat([moxie.grouped_mm(x, w[None], bias=b, recipe=linear.conversion.recipe) for w, b in parts], 1)


class OneProcess:
    """A model with f32 weights that computes, in one process, the losses and gradients that the ranks of a mesh get."""

    def __init__(self, sizes: Sizes, wire: str | None = None, **options):
        self.master, self.sizes, self.wire = seeded(**options), sizes, wire

    def backward(self, step: int = 0) -> float:
        """Sets the gradients of the f32 weights; returns the mean of the batches' losses."""
        total, sizes = 0.0, self.sizes
        for parameter in self.master.parameters():
            parameter.grad = torch.zeros(parameter.shape)
        for group in range(sizes.dp):
            copies = [copy.deepcopy(self.master).bfloat16() for _ in range(sizes.ep)]
            for one in copies:
                one.zero_grad()
            batches = range(group * sizes.ep, (group + 1) * sizes.ep)
            xs = [tokens(100 * step + batch) for batch in batches]
            xs = [x + _up(one.up, x, sizes.tp) for one, x in zip(copies, xs, strict=True)]
            ys = moe_of_groups([one.moe for one in copies], xs, sizes.tp, self.wire)
            losses = [loss_of(x + y, batch, step) for x, y, batch in zip(xs, ys, batches, strict=True)]
            sum(losses[1:], losses[0]).backward()
            total += sum(loss.item() for loss in losses)
            for one in copies:
                for name, grad in gradients(one).items():
                    self.master.get_parameter(name).grad += grad.float()
        for parameter in self.master.parameters():
            parameter.grad /= sizes.batches
        return total / sizes.batches
