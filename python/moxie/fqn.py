"""FqnToConfig maps names to configs; this file also decides which key wins if several match."""

import dataclasses
import difflib
import re

from moxie.config import AnyConfig, recipe_of
from moxie.torchao_objects import config_from_torchao

DEFAULT = "_default"


@dataclasses.dataclass(frozen=True)
class FqnToConfig:
    """Maps fully qualified names of parameters and modules to configs. None leaves a target alone.

    A key is an exact name, or `re:` and a pattern that must match a whole name. A key that names a module applies to everything
    inside it. If several keys match a parameter, the first of these wins: the parameter's exact name; the exact name of its
    module, or of the nearest enclosing module; the first pattern that matches the parameter; the first pattern that matches its
    module, or the nearest enclosing module; `_default`.

    >>> config = moxie.FqnToConfig({
    ...     "re:.*experts.*": moxie.MXFP8GroupedMMConfig.from_recipe("mxfp8_rceil"),
    ...     "layers.0.experts.w2": moxie.FP8GroupedMMConfig(),
    ...     "re:.*router": None,
    ... })
    """

    fqn_to_config: dict[str, AnyConfig | None] = dataclasses.field(default_factory=dict)
    module_fqn_to_config: dict[str, AnyConfig | None] | None = None  # torchao's older name of fqn_to_config
    version: int = 1

    def __post_init__(self):
        op = "FqnToConfig"
        given, older = self.fqn_to_config, self.module_fqn_to_config
        if older and given and older != given:
            raise ValueError(f"{op}: fqn_to_config and module_fqn_to_config are both given and differ")
        object.__setattr__(self, "fqn_to_config", dict(given or older or {}))
        object.__setattr__(self, "module_fqn_to_config", self.fqn_to_config)
        if not self.fqn_to_config:
            raise ValueError(f"{op}: there are no keys")
        for key, config in self.fqn_to_config.items():
            if not isinstance(key, str):
                raise TypeError(f"{op}: a key must be a name or re:pattern, got {key!r}")
            if key.startswith("re:"):
                try:
                    re.compile(key[3:])
                except re.error as error:
                    raise ValueError(f"{op}: {key!r} is no regular expression: {error}") from None
            if config is not None:
                self.fqn_to_config[key] = config = config_from_torchao(config, f"{op}: {key!r}")
                recipe_of(config, f"{op}: {key!r}")

    def __hash__(self) -> int:
        return hash(tuple(self.fqn_to_config.items()))


def _around(fqn: str) -> list[str]:
    """Returns the names of the module and of those that enclose it, nearest first, without the root, which no key can name."""
    parts = fqn.split(".") if fqn else []
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def matching_key(config: FqnToConfig, parameter_fqn: str, module_fqn: str) -> str | None:
    """Returns the key that decides how a parameter is converted, or None if no key matches."""
    keys = config.fqn_to_config
    patterns = [key for key in keys if key.startswith("re:")]
    for name in (parameter_fqn, *_around(module_fqn)):
        if name in keys:
            return name
    for name in (parameter_fqn, *_around(module_fqn)):
        for pattern in patterns:
            if re.fullmatch(pattern[3:], name):
                return pattern
    return DEFAULT if DEFAULT in keys else None


def names_matched(key: str, names: list[str]) -> list[str]:
    """Names of the modules and parameters that a key matches."""
    if key.startswith("re:"):
        return [name for name in names if re.fullmatch(key[3:], name)]
    return [name for name in names if name == key]


def closest(key: str, names: list[str]) -> str:
    """Suggests similar names, for an error message."""
    text = re.sub(r"[\^$\\*+?()\[\]|]|^re:", "", key)
    near = difflib.get_close_matches(text, names, n=3, cutoff=0.5)
    if not near:
        last = text.rsplit(".", 1)[-1]
        near = [name for name in names if last and last in name][:3]
    if not near and re.search(r"expert|moe|mlp|feed_forward|ffn", text):
        # The key may name experts as another version of the model did, such as linears that are now one 3D parameter. Suggest
        # the names of the experts that the model has.
        found = re.sub(r"\d+", "0", text)
        experts = [name for name in names if re.search(r"(^|\.)experts\.", name)]
        near = difflib.get_close_matches(found, experts, n=3, cutoff=0.0) if experts else []
    return f" (did you mean {', '.join(near)}?)" if near else ""
