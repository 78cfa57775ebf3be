"""Questions about sharded tensors and modules, answered without importing torch.distributed, which takes a second, unless the
caller has imported it already."""

import sys
from typing import Any

from torch import Tensor, nn

_PLAIN = (Tensor, nn.Parameter, type(None))


def any_dtensor(*values: Any) -> bool:
    """Whether one of the values is a DTensor."""
    for value in values:  # not by all() of a generator, which costs the host twice as much
        if type(value) not in _PLAIN:
            break
    else:
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(value, DTensor) for value in values)


def class_of(module: nn.Module) -> type:
    """The class of the module. FSDP2's fully_shard replaces a module's class; this returns the class it had before."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    cls = type(module)
    return cls.__bases__[1] if fsdp is not None and len(cls.__bases__) == 2 and cls.__bases__[0] is fsdp.FSDPModule else cls


def set_class(module: nn.Module, cls: type) -> None:
    """Changes the class of the module. If FSDP2 shards the module, the new class derives from FSDPModule as well."""
    if class_of(module) is not type(module):
        members = {
            name: value for name, value in vars(type(module)).items() if name not in ("__dict__", "__weakref__", "__doc__")
        }
        cls = type(f"FSDP{cls.__name__}", (type(module).__bases__[0], cls), members)
    module.__class__ = cls


def gathered_plain(model: nn.Module) -> set[int]:
    """Returns the ids of the sharded parameters that FSDP2 replaces by plain tensors while they are gathered."""
    if "torch.distributed.fsdp" not in sys.modules:
        return set()
    from moxie.distributed.fsdp import sharded_parameters

    return {id(param.sharded_param) for param in sharded_parameters(model) if not param.is_dtensor}
