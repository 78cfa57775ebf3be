"""Converts a parameter in place, and back.

Only the class of the parameter changes, so every reference to it stays valid, including the optimizer's. A parameter that
replaces it later (load_state_dict(assign=True), FSDP2) is converted as well.
"""

import sys
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from moxie.config import wants_cache
from moxie.converted import Conversion, ConvertedParameter, ConvertedTensor, is_converted, know_transformers, tag
from moxie.dtensors import any_dtensor
from moxie.gemm import WeightCache


def transposed(w: Tensor) -> Tensor:
    return w.mT


def stacked(w: Tensor) -> Tensor:
    return w.unsqueeze(0)


class ViewCache(WeightCache):
    """A weight cache of a view of the parameter: a transposed [G, K, N], or a matrix [N, K] seen as [1, N, K]."""

    def __init__(self, w: Tensor, view: Callable[[Tensor], Tensor], *, recipe: str):
        self._view = view
        super().__init__(w, recipe=recipe)

    def _as_taken(self, w: Tensor) -> Tensor:
        return self._view(w)


class Names(dict):
    """Maps the names of a module's converted parameters to their conversions. Pickling it saves plain parameters beside their
    conversions; loading converts them again."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = weakref.ref(module)

    def __reduce_ex__(self, protocol):
        module = self.module()
        assert module is not None  # pickle holds a reference to the module while it saves it
        entries = [(name, conversion, module._parameters.get(name)) for name, conversion in self.items()]
        return _rebuild, (module, [(*entry, getattr(entry[2], "_moxie_transposed", None)) for entry in entries])


def _rebuild(module: nn.Module, entries: list[tuple[str, Conversion, nn.Parameter, bool | None]]) -> Names:
    names = Names(module)
    for name, conversion, parameter, transposed_by in entries:
        names[name] = conversion
        if type(parameter) is nn.Parameter:
            tag(parameter, conversion, transposed_by)
    return names


def convert_parameter_(module: nn.Module, name: str, conversion: Conversion) -> Conversion:
    """Converts the parameter `name` of the module, in place. A parameter with several names has one conversion."""
    _let_torch_know()
    parameter = module._parameters[name]
    assert parameter is not None
    if getattr(parameter, "_moxie", None) is not conversion:
        _convert(module, name, parameter, conversion)
    if "_moxie_converted" not in module.__dict__:
        module.__dict__["_moxie_converted"] = Names(module)
        module.register_load_state_dict_post_hook(_after_load)
        module.register_forward_pre_hook(_before_forward)
    module.__dict__["_moxie_converted"][name] = conversion
    return conversion


def _convert(module: nn.Module, name: str, parameter: nn.Parameter, conversion: Conversion) -> None:
    restore_parameter_(module, name)
    if wants_cache(conversion.config) and parameter.dim() == 3:
        args = (parameter, transposed) if conversion.cache_is_transposed else (parameter,)
        conversion.cache = (ViewCache if conversion.cache_is_transposed else WeightCache)(*args, recipe=conversion.recipe)
        module.add_module(f"{name}_cache", conversion.cache)  # as a submodule, the cache moves to another device with the module
    if not any_dtensor(parameter):  # for a sharded parameter, _before_forward tags the tensor that FSDP2 gathers
        tag(parameter, conversion)


def _after_load(module: nn.Module, keys) -> None:
    """Converts the parameters that load_state_dict(assign=True) has assigned, and fills the weight caches again."""
    refresh_parameters_(module)


def refresh_parameters_(module: nn.Module) -> list[WeightCache | None]:
    """Converts parameters that have replaced converted ones, quantizes them into their weight caches, and returns the caches."""
    converted = module.__dict__.get("_moxie_converted", {})
    for name, conversion in converted.items():
        parameter = module._parameters.get(name)
        if parameter is not None and type(parameter) in _OF_OURS:  # a sharded parameter is left to _before_forward
            tag(parameter, conversion)
            if conversion.cache is not None:
                conversion.cache.refresh_(parameter)
    return [conversion.cache for conversion in converted.values()]


# Types that may replace a converted parameter and are converted again: to_empty() leaves a ConvertedTensor there.
_OF_OURS = (nn.Parameter, ConvertedTensor, ConvertedParameter)


def _before_forward(module: nn.Module, args) -> None:
    """Converts parameters that have replaced converted ones, as FSDP2 does before a forward."""
    if torch.compiler.is_compiling():
        return
    for name, conversion in module.__dict__["_moxie_converted"].items():
        parameter = module._parameters.get(name)
        if parameter is not None and type(parameter) in _OF_OURS and getattr(parameter, "_moxie", None) is not conversion:
            # None keeps the product from using the weight cache, which was made from the parameter that was replaced.
            tag(parameter, conversion, False if conversion.cache is None else None)


def restore_parameter_(module: nn.Module, name: str) -> None:
    """The inverse of convert_parameter_. Does nothing to a parameter that is not converted."""
    parameter = module._parameters.get(name)
    if parameter is not None and is_converted(parameter):
        parameter.__class__ = nn.Parameter
        for attribute in ("_moxie", "_moxie_transposed", "_moxie_is_sum"):
            parameter.__dict__.pop(attribute, None)
    converted = module.__dict__.get("_moxie_converted", {})
    conversion = converted.pop(name, None)
    if conversion is not None:
        conversion.ended = True
        if conversion.cache is not None:
            module._modules.pop(f"{name}_cache", None)
    if not converted:
        for hooks, ours in ((module._forward_pre_hooks, _before_forward), (module._load_state_dict_post_hooks, _after_load)):
            for key in [key for key, hook in hooks.items() if hook is ours]:
                del hooks[key]
        module.__dict__.pop("_moxie_converted", None)


def _let_torch_know() -> None:
    """Registers Moxie's products and ConvertedParameter in the lists that Dynamo and torch's optimizers consult."""
    # Dynamo calls __torch_function__ only for functions on this list, which by default holds public functions only.
    try:
        from torch._dynamo.variables.torch import get_overridable_functions
    except ImportError:
        pass
    else:
        get_overridable_functions().update([torch._grouped_mm, *know_transformers()])
    # Optimizers use their foreach kernels by default only if the type of every parameter is on this list.
    types = getattr(sys.modules["torch.optim.optimizer"], "_foreach_supported_types", None)
    if types is not None and ConvertedParameter not in types:
        types.append(ConvertedParameter)
