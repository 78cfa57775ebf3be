"""The report of `quantize_`: a list of entries, printed as a tree."""

import dataclasses
import warnings

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from moxie.converted import Conversion
from moxie.recipe import Recipe, recipe_names


def recipe_label(recipe: str) -> str:
    """The name of the preset that the recipe equals, or equals but for `out`; otherwise the recipe's whole text."""
    wanted = Recipe.from_name(recipe)
    for ignored in ((), ("out",)):
        for name in recipe_names():
            preset = Recipe.from_name(name)
            if all(
                getattr(preset, field.name) == getattr(wanted, field.name)
                for field in dataclasses.fields(Recipe)
                if field.name not in ignored
            ):
                return name if not ignored else f"{name}:out={wanted.out}"
    return recipe


@dataclasses.dataclass
class Entry:
    """One line of the report: a linear, a parameter of experts, or a GroupedExperts module."""

    fqn: str
    kind: str  # linear, parameter or experts
    shape: tuple[int, ...]
    numel: int
    conversion: Conversion | None = None  # made by this call of quantize_, or by an earlier one
    reason: str = ""  # why this call did not convert the target; empty if it did

    def __str__(self) -> str:
        what = f"{self.kind} {'x'.join(str(size) for size in self.shape)}"
        if self.conversion is None:
            return f"{what}  left alone: {self.reason}"
        cached = ", cached" if self.conversion.cache is not None else ""
        before = f" as before: {self.reason}" if self.reason else ""
        return f"{what}  {recipe_label(self.conversion.recipe)}{cached}{before}"


@dataclasses.dataclass
class Report:
    """The result of `quantize_`. `print(report)` shows the tree."""

    entries: list[Entry]
    all_parameters: int

    @property
    def converted(self) -> list[str]:
        """Names of the converted linears (modules) and of the converted parameters of experts."""
        return [entry.fqn for entry in self.entries if not entry.reason]

    @property
    def left_alone(self) -> dict[str, str]:
        """Maps the names of targets that were not converted to the reason."""
        return {entry.fqn: entry.reason for entry in self.entries if entry.reason}

    @property
    def unused(self) -> list[str]:
        """Names of converted targets that no forward has multiplied by yet."""
        return [
            entry.fqn
            for entry in self.entries
            if entry.conversion is not None and not entry.conversion.used and not entry.conversion.ended
        ]

    def __str__(self) -> str:
        numel = sum(entry.numel for entry in self.entries if entry.conversion is not None)
        before = sum(entry.conversion is not None for entry in self.entries) - len(self.converted)
        also = f" and {before} before" if before else ""
        lines = [
            f"{len(self.converted)} of {len(self.entries)} converted{also}: {numel} of {self.all_parameters} parameters "
            f"({100 * numel / max(self.all_parameters, 1):.1f} %)"
        ]
        shown: list[str] = []
        rows: list[tuple[str, str]] = []
        for entry in self.entries:
            *above, name = entry.fqn.split(".")
            common = 0
            while common < min(len(above), len(shown)) and above[common] == shown[common]:
                common += 1
            rows += [("  " * (depth + 1) + above[depth], "") for depth in range(common, len(above))]
            rows.append(("  " * (len(above) + 1) + (name or "(root)"), str(entry)))
            shown = above
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join(lines + [f"{name:{width}}  {entry}".rstrip() for name, entry in rows])


def _is_compiled(module: nn.Module) -> bool:
    """Whether the module is compiled. Its conversions are not warned about, because products under activation checkpointing in a
    graph leave no record of their use."""
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


class WarnUnused:
    """A forward hook: warns after the first eager forward about conversions that nothing used, and removes itself."""

    def __init__(self, report: Report):
        self.report = report
        self.handle: RemovableHandle | None = None

    def __call__(self, module: nn.Module, args, out) -> None:
        if torch.compiler.is_compiling():
            return
        if self.handle is not None:
            self.handle.remove()
        compiled = [fqn for fqn, inside in module.named_modules() if _is_compiled(inside)]
        unused = [fqn for fqn in self.report.unused if not any(fqn == outer or fqn.startswith(f"{outer}.") for outer in compiled)]
        if unused:
            warnings.warn(
                f"quantize_: {', '.join(unused)} converted, but the model's forward never multiplied activations by "
                "them, so they run as before: the model uses them in something other than torch._grouped_mm, F.grouped_mm, "
                "F.linear, matmul, mm, bmm or addmm, or it does not call the module's own forward",
                stacklevel=2,
            )
