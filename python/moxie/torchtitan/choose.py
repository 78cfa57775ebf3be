"""Chooses by name which experts, linears and token dispatchers of a TorchTitan 0.3 model are replaced, and logs what was done."""

import collections
import re
from collections.abc import Callable, Sequence

from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
from torchtitan.tools.logging import logger

from moxie.config import recipe_of
from moxie.expert_parallel import Wire
from moxie.fqn import closest
from moxie.gemm import DEFAULT_RECIPE
from moxie.report import recipe_label
from moxie.skip import LM_SKIP, SMALLEST
from moxie.torchtitan.dispatcher import moxie_dispatcher
from moxie.torchtitan.replace import obstacle_of, quantized_experts, quantized_linear


class Choice:
    """The choices of one override or one converter. It is given each config of its kind with its name, and returns the config
    that takes its place, or the same one.

    `fqns` are parts of names: what contains one of them is chosen, and with none everything is. Linears whose whole name matches
    a pattern of `skip` are left alone. The default of `skip` without `fqns` is that of `quantize_`: `moxie.LM_SKIP`, and linears
    that are very small.
    """

    def __init__(self, op: str, recipe: str | None, fqns: Sequence[str] | None, skip: Sequence[str] | None = None):
        for name, value in (("fqns", fqns), ("skip", skip)):
            if isinstance(value, str) or not all(isinstance(one, str) for one in value or ()):
                raise TypeError(f"{op}: {name} must be a list of texts, got {value!r}")
        self.op, self.fqns = op, list(fqns or ())
        self.recipe = str(recipe_of(recipe or DEFAULT_RECIPE, op))
        self.by_default = skip is None and not self.fqns
        self.skip = list(LM_SKIP) if self.by_default else list(skip or ())
        for pattern in self.skip:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{op}: {pattern!r} in skip is no regular expression: {error}") from None
        self.replaced: list[str] = []
        self.left_alone: dict[str, str] = {}  # names, and why
        self.how = f" in {recipe_label(self.recipe)}"  # as the report says it

    def experts(self, config: GroupedExperts.Config, fqn: str) -> GroupedExperts.Config:
        return self._chosen(fqn, config, "", lambda: quantized_experts(config, self.recipe))

    def linear(self, config: Linear.Config, fqn: str) -> Linear.Config:
        on_list = any(re.fullmatch(pattern, fqn) for pattern in self.skip)
        is_small = self.by_default and min(config.in_features, config.out_features) < SMALLEST
        reason = obstacle_of(config) or ("on the skip list" if on_list else "")
        reason = reason or (f"with a side smaller than {SMALLEST}" if is_small else "")
        return self._chosen(fqn, config, reason, lambda: quantized_linear(config, self.recipe, fqn))

    def dispatcher(self, config: LocalTokenDispatcher.Config, fqn: str, wire: Wire | None) -> LocalTokenDispatcher.Config:
        self.how = f", wire {wire or 'fp8 where the recipe allows it'}"
        return self._chosen(fqn, config, "", lambda: moxie_dispatcher(config, self.recipe, wire))

    def _chosen(self, fqn: str, config, reason: str, replacement: Callable):
        if self.fqns and not any(part in fqn for part in self.fqns):
            reason = "not in fqns"
        if reason:
            self.left_alone[fqn] = reason
            return config
        self.replaced.append(fqn)
        return replacement()

    def finish(self, kind: str) -> None:
        """Logs what was replaced. Raises if an entry of `fqns` or `skip` matches no name, or if nothing was replaced."""
        names = [*self.replaced, *self.left_alone]
        for part in self.fqns:
            if not any(part in fqn for fqn in names):
                raise ValueError(f"{self.op}: {part!r} in fqns is part of no name{closest(part, names)}")
        for pattern in () if self.by_default else self.skip:
            if not any(re.fullmatch(pattern, fqn) for fqn in names):
                raise ValueError(f"{self.op}: {pattern!r} in skip matches the whole name of no linear{closest(pattern, names)}")
        reasons = collections.Counter(self.left_alone.values())
        alone = "; left alone: " + ", ".join(f"{count} {reason}" for reason, count in reasons.items()) if reasons else ""
        if not self.replaced:
            raise ValueError(f"{self.op}: nothing to replace: the model has {len(names)} {kind}{alone}")
        logger.info(f"{self.op}: {len(self.replaced)} of {len(names)} {kind}{self.how}{alone}")
