"""The overrides of TorchTitan 0.3, as in `--override.imports moxie.torchtitan.experts moxie.torchtitan.linears`.

TorchTitan asks an override about each name (`matches`) and then calls its factory for each config, in the same order, without the
name. Linears are chosen by name, so the override remembers the names that it was asked about. Dispatchers and the experts beside
them are given to two overrides, in the order in which the user names these, and find each other by the name of what holds both.
"""

from collections import deque
from collections.abc import Sequence

from torchtitan.config.override import _REGISTRY, Override
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

from moxie.expert_parallel import Wire
from moxie.torchtitan.choose import Choice
from moxie.torchtitan.dispatcher import MoxieTokenDispatcher
from moxie.torchtitan.replace import takes_tokens

_PACKAGE = __package__  # where users name the overrides


class _Round:
    """What the factories have replaced in one call of TorchTitan's apply_overrides, by the name of the module that holds it."""

    def __init__(self) -> None:
        self.began = False
        self.fused: set[str] = set()  # names of modules whose experts take tokens
        self.dispatchers: dict[str, MoxieTokenDispatcher.Config] = {}

    def note(self, fqn: str, config) -> None:
        holder = fqn.rpartition(".")[0]
        if takes_tokens(config):
            self.fused.add(holder)
        elif isinstance(config, MoxieTokenDispatcher.Config):
            self.dispatchers[holder] = config
        if holder in self.fused and holder in self.dispatchers:
            self.dispatchers[holder].experts_take_tokens = True


class _ByName(Override):
    """An override that knows the name of each config that its factory is given."""

    round = _Round()  # shared by all overrides

    def __init__(self, target: type, factory, description: str):
        super().__init__(target, factory, None, description, _PACKAGE)
        self.names: deque[str] = deque()
        self.choice: Choice | None = None

    def matches(self, fqn: str) -> bool:
        fqn = fqn.removeprefix("model_spec.model.")  # the trainer's config holds the model's under this name
        # All names are asked about before the first factory is called, so this is another call of apply_overrides.
        if _ByName.round.began:
            _ByName.round = _Round()
        if self.choice is not None or fqn in self.names:  # left over from a call that ended in an error
            self.names.clear()
            self.choice = None
        self.names.append(fqn)
        return True

    def next_name(self, choice: Choice) -> tuple[Choice, str]:
        """Returns the name of the next config, and the choice of this call of apply_overrides: `choice` if there is none yet."""
        self.choice = self.choice or choice
        _ByName.round.began = True
        return self.choice, self.names.popleft()

    def end(self, kind: str) -> None:
        """Logs the report after the last config of a call of apply_overrides."""
        choice = self.choice
        if not self.names and choice is not None:
            self.choice = None
            choice.finish(kind)


def experts(config: GroupedExperts.Config, *, recipe: str | None = None, fqns: Sequence[str] = ()) -> GroupedExperts.Config:
    """Makes experts multiply through Moxie, in one autograd node with one product for w1 and w3. Parameters keep their names."""
    choice, fqn = _experts.next_name(Choice(f"{_PACKAGE}.experts", recipe, fqns))
    replacement = choice.experts(config, fqn)
    _ByName.round.note(fqn, replacement)
    _experts.end("experts")
    return replacement


def linears(
    config: Linear.Config, *, recipe: str | None = None, fqns: Sequence[str] = (), skip: Sequence[str] | None = None
) -> Linear.Config:
    """Makes linears MXLinear, except those on the skip list."""
    choice, fqn = _linears.next_name(Choice(f"{_PACKAGE}.linears", recipe, fqns, skip))
    replacement = choice.linear(config, fqn)
    _linears.end("linears")
    return replacement


def dispatch(
    config: LocalTokenDispatcher.Config, *, wire: Wire | None = None, recipe: str | None = None, fqns: Sequence[str] = ()
) -> LocalTokenDispatcher.Config:
    """Sends tokens to experts on other ranks, and results back, through Moxie's exchange; in FP8 if the recipe allows it."""
    choice, fqn = _dispatch.next_name(Choice(f"{_PACKAGE}.dispatch", recipe, fqns))
    replacement = choice.dispatcher(config, fqn, wire)
    _ByName.round.note(fqn, replacement)
    _dispatch.end("token dispatchers")
    return replacement


_experts = _ByName(GroupedExperts.Config, experts, "Experts in MXFP8, w1 and w3 in one product")
_linears = _ByName(Linear.Config, linears, "Linears in MXFP8")
_dispatch = _ByName(LocalTokenDispatcher.Config, dispatch, "Tokens to the ranks of their experts in FP8")
for _one in (_experts, _linears, _dispatch):
    _REGISTRY[_one.name] = _one
