"""The state of modules before a call changes them, so that a call which fails midway can put it back."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from moxie.converted import Conversion


class Before:
    """What modules and their parameters were: classes, attributes, children, hooks. Values of parameters are not kept: nothing
    that is put back changes them."""

    def __init__(self, modules: Iterable[nn.Module]):
        self._modules = {id(module): (module, type(module), _copied(module.__dict__)) for module in modules}
        self._parameters: dict[int, tuple[Any, type, dict]] = {}
        self._conversions: dict[int, tuple[Conversion, dict]] = {}
        for module, _, state in self._modules.values():
            for parameter in state["_parameters"][1].values():
                if parameter is not None:
                    self._parameters[id(parameter)] = (parameter, type(parameter), dict(parameter.__dict__))
                    self._note(getattr(parameter, "_moxie", None))
            self._note(*module.__dict__.get("_moxie_converted", {}).values())
            self._note(module.__dict__.get("conversion"), module.__dict__.get("_conversion"))

    def _note(self, *conversions: Conversion | None) -> None:
        for conversion in conversions:
            if conversion is not None:
                self._conversions[id(conversion)] = (conversion, dict(conversion.__dict__))

    def put_back(self) -> None:
        for module, cls, state in self._modules.values():
            module.__class__ = cls
            _restore(module.__dict__, state)
        for parameter, cls, attributes in self._parameters.values():
            if type(parameter) is not cls:
                parameter.__class__ = cls
            parameter.__dict__.clear()
            parameter.__dict__.update(attributes)
        for conversion, attributes in self._conversions.values():
            conversion.__dict__.clear()
            conversion.__dict__.update(attributes)


def _copied(attributes: dict) -> dict[str, tuple[Any, Any]]:
    """Each attribute, and of a dict (children, parameters, hooks) what it holds."""
    return {name: (value, dict(value) if isinstance(value, dict) else None) for name, value in attributes.items()}


def _restore(attributes: dict, state: dict[str, tuple[Any, Any]]) -> None:
    attributes.clear()
    for name, (value, held) in state.items():
        if held is not None:  # the same dict, because handles of hooks know it
            value.clear()
            value.update(held)
        attributes[name] = value
