"""The overrides of TorchTitan 0.3: `--override.imports moxie.torchtitan.experts moxie.torchtitan.linears`.

TorchTitan asks an override about each name (`matches`) and then calls its factory for each config, in the same order, without the
name. Linears are chosen by name, so the override remembers the names that it was asked about.
"""

from collections import deque
from collections.abc import Sequence

from torchtitan.config.override import _REGISTRY, Override
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts

from moxie.torchtitan.choose import Choice

_PACKAGE = __package__  # where users name the overrides


class _ByName(Override):
    """An override that knows the name of the config that its factory is given."""

    def __init__(self, target: type, factory, description: str):
        super().__init__(target, factory, None, description, _PACKAGE)
        self.names: deque[str] = deque()
        self.choice: Choice | None = None

    def matches(self, fqn: str) -> bool:
        fqn = fqn.removeprefix("model_spec.model.")  # the trainer's config holds the model's
        if self.choice is not None or fqn in self.names:  # an earlier round ended in an error
            self.names.clear()
            self.choice = None
        self.names.append(fqn)
        return True

    def next_name(self, choice: Choice) -> tuple[Choice, str]:
        """The name of the next config, and the choice of this round, which `choice` is if there is none yet."""
        self.choice = self.choice or choice
        return self.choice, self.names.popleft()

    def end(self, kind: str) -> None:
        """Reports after the last config of a round."""
        choice = self.choice
        if not self.names and choice is not None:
            self.choice = None
            choice.finish(kind)


def experts(config: GroupedExperts.Config, *, recipe: str | None = None, fqns: Sequence[str] = ()) -> GroupedExperts.Config:
    """Experts through Moxie: w1 and w3 in one product, with SwiGLU and w2 in one node. Parameters keep their names."""
    choice, fqn = _experts.next_name(Choice(f"{_PACKAGE}.experts", recipe, fqns))
    replacement = choice.experts(config, fqn)
    _experts.end("experts")
    return replacement


def linears(
    config: Linear.Config, *, recipe: str | None = None, fqns: Sequence[str] = (), skip: Sequence[str] | None = None
) -> Linear.Config:
    """Linears as MXLinear, but for those of the skip list."""
    choice, fqn = _linears.next_name(Choice(f"{_PACKAGE}.linears", recipe, fqns, skip))
    replacement = choice.linear(config, fqn)
    _linears.end("linears")
    return replacement


_experts = _ByName(GroupedExperts.Config, experts, "Experts in MXFP8, w1 and w3 in one product")
_linears = _ByName(Linear.Config, linears, "Linears in MXFP8")
for _one in (_experts, _linears):
    _REGISTRY[_one.name] = _one
