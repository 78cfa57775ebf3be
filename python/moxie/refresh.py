"""Refreshes the weight caches of a model."""

import torch
from torch import nn

from moxie.convert_parameter import refresh_parameters_
from moxie.gemm import WeightCache
from moxie.linear import MXLinear
from moxie.nn import GroupedExperts


def weight_caches(model: nn.Module) -> list[WeightCache]:
    return [module for module in model.modules() if isinstance(module, WeightCache)]


def refresh_(model: nn.Module) -> None:
    """Quantizes every cached weight of the model again. Call it after weights changed in any way but an optimizer step.

    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    >>> report = moxie.quantize_(model, moxie.MXLinearConfig(weight_cache=True))
    >>> with torch.no_grad():
    ...     model[0].weight.zero_()[0, :2].tolist()
    [0.0, 0.0]
    >>> moxie.refresh_(model)
    """
    done = {id(cache) for module in model.modules() for cache in _refresh_owned(module)}
    for cache in weight_caches(model):
        if id(cache) not in done:
            cache.refresh_()


def _refresh_owned(module: nn.Module) -> list[WeightCache | None]:
    """Refreshes the weight caches that the module owns from its current parameters, and returns them."""
    if isinstance(module, GroupedExperts):
        module.refresh_()
        return [module.cache13, module.cache2]
    if isinstance(module, MXLinear):
        module.refresh_()
        return [module.conversion.cache]
    return refresh_parameters_(module)


def refresh_after(model: nn.Module, optimizer: torch.optim.Optimizer):
    """Calls refresh_(model) after every step of the optimizer. Remove the returned handle to stop that.

    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    >>> report = moxie.quantize_(model, moxie.MXLinearConfig(weight_cache=True))
    >>> handle = moxie.refresh_after(model, torch.optim.AdamW(model.parameters()))
    """
    if not weight_caches(model):
        raise ValueError("refresh_after: the model has no weight cache; weight_cache=True in a config asks for one")
    return optimizer.register_step_post_hook(lambda *_: refresh_(model))
