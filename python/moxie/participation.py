"""participation: which converted weights took part in the last step."""

import dataclasses

from torch import nn

from moxie.converted import Conversion
from moxie.steps import has_hidden_products


@dataclasses.dataclass(frozen=True)
class Part:
    """Whether a converted linear, parameter or GroupedExperts multiplied in the last step; None if this is not known."""

    fqn: str
    forward: bool | None
    backward: bool | None


@dataclasses.dataclass(frozen=True)
class Participation:
    """The result of `participation`. Printing it lists the weights that did not take part.

    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    >>> report = moxie.quantize_(model, "mxfp8_rceil")
    >>> y = model(torch.randn(2, 64))
    >>> print(moxie.participation(model).check())
    of 1 converted, 1 took part in forward, 0 in backward
      0  not in backward
    """

    parts: list[Part]

    @property
    def forward(self) -> list[str]:
        """Names of the converted weights that multiplied through Moxie in the last forward."""
        return [part.fqn for part in self.parts if part.forward]

    @property
    def backward(self) -> list[str]:
        """Names of the converted weights that multiplied through Moxie in the backward of that forward."""
        return [part.fqn for part in self.parts if part.backward]

    @property
    def missing(self) -> list[str]:
        """Names of the converted weights that did not multiply in the last forward."""
        return [part.fqn for part in self.parts if part.forward is False]

    @property
    def unknown(self) -> list[str]:
        """Names of the converted weights that may have multiplied inside a checkpointed part of a graph: it keeps no record."""
        return [part.fqn for part in self.parts if part.forward is None]

    def check(self) -> "Participation":
        """Raises if a converted weight did not multiply in the last forward."""
        if self.missing:
            raise RuntimeError(f"participation: {', '.join(self.missing)} converted, but not multiplied in the last step")
        return self

    def __str__(self) -> str:
        lines = [f"of {len(self.parts)} converted, {len(self.forward)} took part in forward, {len(self.backward)} in backward"]
        lines += [f"  {part.fqn}  not in forward" for part in self.parts if part.forward is False]
        lines += [f"  {part.fqn}  not in backward" for part in self.parts if part.forward and not part.backward]
        lines += [f"  {fqn}  unknown: inside a checkpointed part of a graph, or not used" for fqn in self.unknown]
        return "\n".join(lines)


def participation(model: nn.Module) -> Participation:
    """Which converted weights multiplied through Moxie in the last step, in forward and in backward.

    A step is a forward of the converted model and the backward that follows. The function can be called at any time. In a graph
    that torch.compile traced with gradients, a weight that took part in forward counts for backward too. Products inside
    activation checkpointing in a graph keep no record; they are listed in `unknown`.

    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    >>> report = moxie.quantize_(model, "mxfp8_rceil")
    >>> y = model[0](torch.randn(2, 64)).sum().backward()
    >>> moxie.participation(model).forward, moxie.participation(model).missing
    (['0'], ['1'])
    """
    model = getattr(model, "_orig_mod", model)
    return Participation([_part(fqn, conversion) for fqn, conversion in conversions_of(model).items()])


def conversions_of(model: nn.Module) -> dict[str, Conversion]:
    """Maps names to the conversions in a model. A conversion with several names is listed under its first name."""
    found: dict[str, Conversion] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        own = module.__dict__.get("conversion", module.__dict__.get("_conversion"))
        named = [(prefix, own)] if isinstance(own, Conversion) else []
        for name, conversion in module.__dict__.get("_moxie_converted", {}).items():
            named.append((f"{prefix}.{name}" if prefix else name, conversion))
        for fqn, conversion in named:
            if id(conversion) not in seen:
                seen.add(id(conversion))
                found[fqn] = conversion
    return found


def _part(fqn: str, conversion: Conversion) -> Part:
    step = conversion.clock.step
    forward: bool | None = conversion.forward_step is step
    if not forward and has_hidden_products():
        return Part(fqn, None, None)
    return Part(fqn, forward, conversion.backward_step is step)
