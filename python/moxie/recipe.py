"""Recipes: how each operand of the three passes of a product is quantized.

A recipe is given by name ("mxfp8_rceil_128"), by name with fields changed ("mxfp8_rceil:rule=floor"), or as a `Recipe`.
docs/RECIPES.md says which to choose.
"""

import dataclasses
from typing import Any, Literal

import torch

from moxie.ops import Block, Rule

_ops = torch.ops.moxie
_PREFIX = {"none": "bf16", "row": "fp8_rowwise", "block": "mxfp8_rceil"}
_BLOCK_FIELDS = ("rule", "activations", "weights", "wgrad_dy", "wgrad_x")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How x, w and dy are quantized. An illegal combination is refused with the reason.

    - `scaling`: none (the bf16 baseline), row (one power-of-two f32 scale per row) or block (MXFP8).
    - `activations`: the block of x in forward and of dy in dgrad. `weights`: the block of w in both; dgrad uses the transpose of
      a block that is one row tall.
    - `wgrad_dy`, `wgrad_x`: the blocks of dy and x in wgrad. `wgrad_with_hp`: wgrad uses dy and x in bf16 instead.
    - `kernels`: auto (the fastest kernels of the device), or emulated (decodes FP8 to bf16, then uses torch's bf16 product).
    - `out`: the dtype of y: bfloat16, float32, or input for the dtype of x.
    - `keep_w`: whether forward makes the form of w that dgrad reads and keeps it, a byte per weight. If False, backward makes it
      from w. Results are the same.

    >>> recipe = moxie.Recipe.from_name("mxfp8_rceil_128")
    >>> recipe.weights, recipe.wgrad_x
    ('128x128', '128x32')
    >>> dataclasses.replace(recipe, rule="floor").rule
    'floor'
    """

    scaling: Literal["none", "row", "block"] = "block"
    rule: Rule = "rceil"
    activations: Block = "1x32"
    weights: Block = "1x32"
    wgrad_dy: Block = "32x1"
    wgrad_x: Block = "32x1"
    wgrad_with_hp: bool = False
    kernels: Literal["auto", "emulated"] = "auto"
    out: Literal["input", "bfloat16", "float32"] = "input"
    keep_w: bool = True

    def __post_init__(self):
        if self.scaling not in _PREFIX:
            raise ValueError(f"Recipe: scaling must be none, row or block, got {self.scaling!r}")
        for name in ("wgrad_with_hp", "keep_w"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"Recipe: {name} must be True or False, got {getattr(self, name)!r}")
        _ops._recipe(str(self))  # raises for an illegal combination of fields

    @classmethod
    def from_name(cls, text: str) -> "Recipe":
        """The recipe of this name; fields may follow it: "mxfp8_rceil:rule=floor,kernels=emulated".

        >>> moxie.Recipe.from_name("mxfp8_rceil:rule=floor") == moxie.Recipe.from_name("mxfp8_floor")
        True
        """
        prefix, _, rest = _ops._recipe(text).partition(":")
        fields: dict[str, Any] = dict(field.split("=") for field in rest.split(","))
        fields |= {name: fields[name] == "true" for name in ("wgrad_with_hp", "keep_w") if name in fields}
        scaling: Any = {prefix: scaling for scaling, prefix in _PREFIX.items()}.get(prefix)
        if scaling is None:
            raise ValueError(f"Recipe.from_name: there is no recipe {text!r}; there are {', '.join(_ops._recipe_names())}")
        return cls(scaling=scaling, **fields)

    def __str__(self) -> str:
        """The recipe as text, the form in which ops take it. `from_name` of this text returns an equal recipe."""
        fields: dict[str, str] = {"kernels": self.kernels, "out": self.out}
        if self.scaling != "none" or self.wgrad_with_hp:
            fields["wgrad_with_hp"] = str(self.wgrad_with_hp).lower()
        if not self.keep_w:
            fields["keep_w"] = "false"
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name in _BLOCK_FIELDS:
            if self.scaling == "block" or getattr(self, name) != defaults[name]:
                fields[name] = getattr(self, name)
        return _PREFIX[self.scaling] + ":" + ",".join(f"{name}={value}" for name, value in fields.items())


AnyRecipe = str | Recipe
DEFAULT_RECIPE = "mxfp8_rceil_128"


def recipe_names() -> list[str]:
    """The names of all presets.

    >>> "mxfp8_rceil_128" in moxie.recipe_names()
    True
    """
    return list(_ops._recipe_names())
