"""Remembers the state of modules before a call changes them, so that a call that fails midway can restore it."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from moxie.converted import Conversion


class Before:
    """The classes, attributes, children and hooks of modules and of their parameters, at the time when it is made. It does not
    hold the values of parameters, because no change that it undoes touches them."""

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
    """Copies the attributes of a module and, of those that are dicts (children, parameters, hooks), the contents."""
    return {name: (value, dict(value) if isinstance(value, dict) else None) for name, value in attributes.items()}


def _restore(attributes: dict, state: dict[str, tuple[Any, Any]]) -> None:
    attributes.clear()
    for name, (value, held) in state.items():
        if held is not None:  # refill the same dict, because handles for removing hooks refer to it
            value.clear()
            value.update(held)
        attributes[name] = value
