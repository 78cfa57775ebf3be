"""The model converters moxie.experts and moxie.linears of TorchTitan 0.2, and their flags.

    --job.custom_config_module=moxie.torchtitan --model.converters=moxie.experts,moxie.linears --moxie.experts.fqns=experts

Where `--moxie.experts.fqns` is not given, `--quantize.grouped_mm.mx.fqns` is taken, which TorchTitan's own converter takes.
"""

import re
from dataclasses import dataclass, field

from torch import nn
from torchtitan.protocols.model_converter import register_model_converter
from torchtitan.tools.logging import logger

from moxie.convert import quantize_
from moxie.gemm import DEFAULT_RECIPE
from moxie.skip import LM_SKIP, why_too_small


@dataclass
class Experts:
    recipe: str = DEFAULT_RECIPE
    """How experts are quantized: a name of moxie.recipe_names(), or a recipe's text."""

    fqns: list[str] | str = field(default_factory=list)
    """Parts of names, separated by commas: experts whose name contains one are converted; with none, all are."""


@dataclass
class Linears:
    recipe: str = DEFAULT_RECIPE
    """How linears are quantized: a name of moxie.recipe_names(), or a recipe's text."""

    fqns: list[str] | str = field(default_factory=list)
    """Parts of names, separated by commas: linears whose name contains one are converted; with none, all but those that
    quantize_ leaves alone."""


@dataclass
class Moxie:
    experts: Experts = field(default_factory=Experts)
    linears: Linears = field(default_factory=Linears)


@dataclass
class JobConfig:
    """The fields that `--job.custom_config_module=moxie.torchtitan` adds to TorchTitan's config."""

    moxie: Moxie = field(default_factory=Moxie)


def _parts(fqns: list[str] | str) -> list[str]:
    return [part for part in (fqns.split(",") if isinstance(fqns, str) else fqns) if part]


class _Converter:
    """The base of both converters. TorchTitan 0.2 makes one from the job's config, then calls convert() with the model before it
    is sharded."""

    name = ""
    fqns: list[str]
    recipe: str

    def chooses(self, module: nn.Module, fqn: str) -> bool:
        raise NotImplementedError

    def convert(self, model: nn.Module) -> None:
        report = quantize_(model, self.recipe, self.chooses)
        unknown = [part for part in self.fqns if not any(part in fqn for fqn in report.converted)]
        if unknown:
            logger.warning(f"{self.name}: {', '.join(unknown)} in fqns is part of no name of what was converted")
        logger.info(f"{self.name}: {str(report).splitlines()[0]}")

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Does nothing, because there are no weight caches that a step would make stale."""


class ExpertsConverter(_Converter):
    name = "moxie.experts"

    def __init__(self, job_config, parallel_dims):
        own = getattr(job_config, "moxie", Moxie()).experts
        self.recipe = own.recipe
        self.fqns = _parts(own.fqns) or _parts(job_config.quantize.grouped_mm.mx.fqns)

    def chooses(self, module: nn.Module, fqn: str) -> bool:
        return not isinstance(module, nn.Linear) and (not self.fqns or any(part in fqn for part in self.fqns))


class LinearsConverter(_Converter):
    name = "moxie.linears"

    def __init__(self, job_config, parallel_dims):
        own = getattr(job_config, "moxie", Moxie()).linears
        self.recipe, self.fqns = own.recipe, _parts(own.fqns)

    def chooses(self, module: nn.Module, fqn: str) -> bool:
        if not isinstance(module, nn.Linear):
            return False
        if self.fqns:
            return any(part in fqn for part in self.fqns)
        return not why_too_small(module.weight) and not any(re.fullmatch(pattern, fqn) for pattern in LM_SKIP)


for _one in (ExpertsConverter, LinearsConverter):
    register_model_converter(_one, _one.name)
