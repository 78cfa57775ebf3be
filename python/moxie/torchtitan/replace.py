"""Makes the configs that replace TorchTitan 0.3's: of experts and linears that multiply through Moxie."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.config.override import derive
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts

from moxie.gemm import expert_mlp, grouped_mm
from moxie.linear import MXLinear, own_forward
from moxie.torchtitan.dispatcher import RoutedTokens


def _local(weight: Tensor) -> Tensor:
    """Returns this rank's part of the weight in bf16, the dtype in which TorchTitan multiplies experts."""
    return (weight.to_local() if isinstance(weight, DTensor) else weight).bfloat16()


def _fused(experts, x: Tensor | RoutedTokens, counts: Tensor) -> Tensor:
    """Computes the MLP of GroupedExperts.forward as one autograd node. w1 and w3 are one product, so x is quantized once. Given
    tokens instead of rows, the node computes the whole block of experts, from tokens to their weighted sums, over the group that
    holds the experts."""
    w13, w2 = torch.cat([_local(experts.w1_EFD), _local(experts.w3_EFD)], dim=1), _local(experts.w2_EDF)
    if isinstance(x, RoutedTokens):
        return x.through(w13, w2, experts.recipe)
    offs = torch.cumsum(counts, dim=0, dtype=torch.int32)
    return expert_mlp(x.bfloat16(), w13, w2, offs, recipe=experts.recipe).type_as(x)


def is_fused(owner: Any) -> bool:
    """Whether experts of this class compute GroupedExperts' MLP, which Moxie computes as one node."""
    return owner.forward is GroupedExperts.forward


@functools.cache
def experts_class(owner: Any) -> Any:
    """Makes a subclass of `owner`, a class of TorchTitan experts, that multiplies through Moxie. Parameters, their names and
    their shardings are the owner's. Experts with another MLP than GroupedExperts' keep it, and only their products run through
    Moxie."""

    class MoxieGroupedExperts(owner):
        @dataclass(kw_only=True, slots=True)
        class Config(owner.Config):
            recipe: str

        def __init__(self, config):
            super().__init__(config)
            self.recipe = config.recipe

        def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
            return grouped_mm(A, B_t.transpose(-2, -1), offs, recipe=self.recipe)

        if is_fused(owner):

            def forward(self, x_RD: Tensor | RoutedTokens, num_tokens_per_expert_E: Tensor) -> Tensor:
                return _fused(self, x_RD, num_tokens_per_expert_E)

    name = f"Moxie{owner.__name__}"
    MoxieGroupedExperts.__name__ = MoxieGroupedExperts.__qualname__ = name
    MoxieGroupedExperts.Config.__qualname__ = f"{name}.Config"
    MoxieGroupedExperts.Config._takes_tokens = is_fused(owner)
    return MoxieGroupedExperts


def quantized_experts(config: GroupedExperts.Config, recipe: str) -> GroupedExperts.Config:
    return derive(config, experts_class(type(config)._owner).Config, recipe=recipe)


def takes_tokens(config: Any) -> bool:
    """Whether the experts of a config take tokens with their route, and so compute the whole block of experts."""
    return getattr(type(config), "_takes_tokens", False)


@functools.cache
def _linear_config_class(base: Any) -> Any:
    """Makes a Config class that builds the linear that `base` builds, and converts it."""

    @dataclass(kw_only=True, slots=True)
    class Config(base):
        recipe: str
        fqn: str

        def build(self, **kwargs):
            return MXLinear.from_float(base.build(self, **kwargs), self.recipe, name=self.fqn)

    Config.__qualname__ = f"Moxie{base.__qualname__}"
    return Config


def obstacle_of(config: Linear.Config) -> str:
    """Returns why a linear cannot be converted, or "" if it can."""
    owner = type(config)._owner
    return own_forward(owner) if issubclass(owner, torch.nn.Linear) else f"{owner.__name__} is no nn.Linear"


def quantized_linear(config: Linear.Config, recipe: str, fqn: str) -> Linear.Config:
    base: Any = type(config)
    return derive(config, _linear_config_class(base), recipe=recipe, fqn=fqn)
