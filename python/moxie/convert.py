"""quantize_: one call converts a model, reports what it did, and refuses what it cannot do."""

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from moxie.config import AnyConfig, GroupedMMConfig, MXLinearConfig, recipe_of, wants_cache
from moxie.convert_parameter import convert_parameter_, restore_parameter_
from moxie.converted import Conversion, is_converted
from moxie.dtensors import any_dtensor, class_of, gathered_plain
from moxie.fqn import DEFAULT, FqnToConfig, closest, matching_key, names_matched
from moxie.gemm import WeightCache
from moxie.linear import MXLinear, own_forward
from moxie.nn import GroupedExperts
from moxie.report import Entry, Report, WarnUnused
from moxie.skip import LM_SKIP, LONE_WEIGHT, is_lone_weight, is_skipped, why_no_experts, why_too_small
from moxie.steps import BeginStep, Clock, NoteForward
from moxie.torchao_objects import config_from_torchao
from moxie.undo import Before

FilterFn = Callable[[nn.Module, str], bool]
_OP = "quantize_"


@dataclasses.dataclass
class Target:
    """Something that can be converted: a linear, a parameter that experts multiply by, or GroupedExperts as a whole."""

    module: nn.Module
    module_fqn: str
    name: str  # name of the parameter in the module
    is_linear: bool
    obstacle: str = ""  # why the target cannot be converted; empty if it can

    @property
    def parameter(self) -> Tensor:
        return getattr(self.module, self.name)

    @property
    def parameter_fqn(self) -> str:
        return f"{self.module_fqn}.{self.name}" if self.module_fqn else self.name

    @property
    def fqn(self) -> str:
        return self.module_fqn if self.is_linear or self.is_own else self.parameter_fqn

    @property
    def is_own(self) -> bool:
        return isinstance(self.module, GroupedExperts)

    @property
    def conversion(self) -> Conversion | None:
        """The target's current conversion, or None if it is not converted yet."""
        if self.is_linear:
            return getattr(self.module, "conversion", None)
        if self.is_own:
            return self.module.__dict__.get("_conversion")
        return self.module.__dict__.get("_moxie_converted", {}).get(self.name) or getattr(self.parameter, "_moxie", None)

    @property
    def kind(self) -> str:
        return "linear" if self.is_linear else "experts" if self.is_own else "parameter"

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters()) if self.is_own else self.parameter.numel()

    def accepts(self, config: AnyConfig) -> bool:
        """Whether the config converts targets of this kind that no key names: a GroupedMMConfig converts no linears, an
        MXLinearConfig no 3D parameters."""
        return not isinstance(config, GroupedMMConfig if self.is_linear else MXLinearConfig)

    def convert_(self, config: AnyConfig, tied: Conversion | None = None) -> Conversion:
        """Converts the target. `tied` is the conversion that the same parameter got under another name, if it has several."""
        if isinstance(self.module, GroupedExperts):
            return _convert_own(self.module, config, self.fqn)
        if isinstance(self.module, nn.Linear):
            return MXLinear.from_float(self.module, config, name=self.fqn).conversion
        return convert_parameter_(self.module, self.name, tied or Conversion(self.fqn, config))


def _convert_own(module: GroupedExperts, config: AnyConfig, fqn: str) -> Conversion:
    """Replaces the recipe of a GroupedExperts module."""
    conversion = Conversion(fqn, config)
    conversion.used = True  # its forward always multiplies through Moxie, so there is nothing to warn about
    _forget(module)
    module.register_forward_hook(NoteForward(conversion))
    if not hasattr(module, "_recipe_before"):
        module._recipe_before = (module.recipe, module.cache13 is not None)
    module._conversion = conversion
    module.set_recipe_(conversion.recipe, weight_cache=bool(wants_cache(config)))
    conversion.cache = module.cache13
    return conversion


def _holds_experts(module: nn.Module) -> bool:
    """Whether 3D parameters of the module may be experts. Parameters of torch's own layers, such as convolutions, never are."""
    source = type(module).__module__
    return not source.startswith("torch.nn.modules.") or source in ("torch.nn.modules.container", "torch.nn.modules.module")


def targets_of(model: nn.Module, named: Sequence[str] = ()) -> Iterator[Target]:
    """Yields all targets of a model. A 2D parameter outside of a linear is a target if `named` holds its name. Other weight
    matrices are yielded with an obstacle, so that the report lists them as left alone."""
    for fqn, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield Target(module, fqn, "weight", True, own_forward(class_of(module)))
        elif isinstance(module, GroupedExperts):
            yield Target(module, fqn, "w13", False)
        elif _holds_experts(module):
            for name, parameter in module._parameters.items():
                is_weight = parameter is None or parameter.is_floating_point()
                target = Target(module, fqn, name, False, "" if is_weight else f"its dtype is {parameter.dtype}")
                if parameter is not None and (parameter.dim() == 3 or (parameter.dim() == 2 and target.parameter_fqn in named)):
                    yield target
                elif parameter is not None and is_lone_weight(target.parameter_fqn, parameter, type(module).__name__):
                    yield dataclasses.replace(target, obstacle=LONE_WEIGHT)


def quantize_(
    model: nn.Module,
    config: AnyConfig | FqnToConfig,
    filter_fn: FilterFn | None = None,
    *,
    skip: Sequence[str] = LM_SKIP,
) -> Report:
    """Converts a model in place and returns a report to print. The state dict does not change.

    Linears become `MXLinear`, and `moxie.nn.GroupedExperts` get the recipe. A 3D parameter stays where it is, and torch's calls
    that multiply by it (torch._grouped_mm, F.grouped_mm, F.linear, matmul, mm, bmm, addmm) run through Moxie. An MXLinearConfig
    converts the linears, a GroupedMMConfig the 3D parameters, and a recipe, or its name, both. Linears whose whole name matches
    a pattern of `skip`, or with a side below 32, are left alone; `filter_fn(module, name)`, if given, chooses modules instead. An
    empty `skip` or a `filter_fn` also takes linears with a side below 32.
    An `FqnToConfig` chooses by name. A key, pattern or filter that matches nothing is refused, and a call that is refused
    changes nothing.

    >>> model = torch.nn.ModuleDict({"up": torch.nn.Linear(64, 96), "lm_head": torch.nn.Linear(96, 10)})
    >>> print(moxie.quantize_(model, "mxfp8_rceil"))
    1 of 2 converted: 6144 of 7210 parameters (85.2 %)
      up       linear 96x64  mxfp8_rceil
      lm_head  linear 10x96  left alone: on the skip list
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{_OP}: model must be an nn.Module, got {type(model).__name__}")
    model = getattr(model, "_orig_mod", model)  # torch.compile wraps the model and keeps the original here
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"{_OP}: {name} has no shape yet; give the model a first batch, and convert it then")
    if skip and skip is not LM_SKIP and (filter_fn is not None or hasattr(config, "fqn_to_config")):
        raise ValueError(f"{_OP}: skip is for a call without filter_fn and without an FqnToConfig, which choose on their own")
    if hasattr(config, "fqn_to_config"):
        if filter_fn is not None:
            raise ValueError(f"{_OP}: with an FqnToConfig filter_fn must be None, because its keys choose")
        config = config if isinstance(config, FqnToConfig) else FqnToConfig(config.fqn_to_config)
        chosen = _choose_by_name(model, config)
    else:
        config = config_from_torchao(config, _OP)
        recipe_of(config, _OP)
        if filter_fn is not None and not callable(filter_fn):
            raise TypeError(f"{_OP}: filter_fn must be a function of a module and its name, got {filter_fn!r}")
        chosen = _choose_by_filter(model, config, filter_fn, skip)
    _check(chosen, gathered_plain(model))
    tied: dict[int, Conversion | None] = {}
    before = Before(target.module for target, one, _ in chosen if one is not None)
    try:
        entries = [_convert(target, one, reason, tied) for target, one, reason in chosen]
    except BaseException:  # a call that fails converts nothing
        before.put_back()
        raise
    report = Report(entries, sum(parameter.numel() for parameter in model.parameters()))
    clock = Clock()
    for entry in entries:
        if entry.conversion is not None:
            entry.conversion.clock = clock
    _forget(model, (WarnUnused, BeginStep))
    model.register_forward_pre_hook(BeginStep(clock))
    hook = WarnUnused(report)
    hook.handle = model.register_forward_hook(hook)
    return report


Choice = tuple[Target, AnyConfig | None, str]  # a target, its config (None: not converted), and why it is not converted


def _choose_by_filter(model: nn.Module, config: AnyConfig, filter_fn: FilterFn | None, skip: Sequence[str]) -> list[Choice]:
    chosen: list[Choice] = []
    targets = list(targets_of(model))
    _check_skip(skip, [target.fqn for target in targets if target.is_linear])
    for target in targets:
        reason = target.obstacle or ("" if target.is_linear or target.is_own else why_no_experts(target.fqn, target.parameter))
        if filter_fn is not None:
            reason = reason or ("" if filter_fn(target.module, target.module_fqn) else "filter_fn says no")
            if not reason and not target.is_linear and not target.accepts(config):
                reason = f"{type(config).__name__} is for linears"
        elif not target.accepts(config):
            reason = f"{type(config).__name__} is for {'3D parameters' if target.is_linear else 'linears'}"
        elif target.is_linear and skip:
            reason = reason or ("on the skip list" if is_skipped(target.fqn, skip) else why_too_small(target.parameter))
        chosen.append((target, None if reason else config, reason))
    if not any(one is not None for _, one, _ in chosen):
        why = "; ".join(f"{target.fqn or '(root)'}: {reason}" for target, _, reason in chosen[:5])
        others = [name or "(root)" for name, module in model.named_modules() if filter_fn is not None and filter_fn(module, name)]
        hint = f"; filter_fn chooses {others[0]}, and is asked about the modules inside that hold the weights" if others else ""
        linears = [target.fqn for target in targets if target.is_linear and re.search(r"(^|\.)experts\.", target.fqn)]
        if linears and isinstance(config, GroupedMMConfig) and filter_fn is None:
            key = r'{r"re:.*\.experts\..*": config}'
            hint = f"; its experts are linears, such as {linears[0]}, and FqnToConfig({key}) converts them"
        raise ValueError(
            f"{_OP}: nothing to convert: the model has {len(chosen)} linears and 3D parameters, and none of them is "
            f"chosen{f' ({why})' if why else ''}{hint}"
        )
    return chosen


def _check_skip(skip: Sequence[str], linears: list[str]) -> None:
    """Refuses a pattern that matches no linear, unless it is one of LM_SKIP."""
    if isinstance(skip, str):
        raise TypeError(f"{_OP}: skip must be a list of patterns, got {skip!r}; a list of one is [{skip!r}]")
    for pattern in skip:
        try:
            matches = any(re.fullmatch(pattern, name) for name in linears)
        except re.error as error:
            raise ValueError(f"{_OP}: {pattern!r} in skip is no regular expression: {error}") from None
        if not matches and pattern not in LM_SKIP:
            raise ValueError(
                f"{_OP}: {pattern!r} in skip matches the whole name of no linear{closest(pattern, linears)}; an "
                "FqnToConfig leaves parameters of experts alone"
            )


def _choose_by_name(model: nn.Module, config: FqnToConfig) -> list[Choice]:
    keys = config.fqn_to_config
    if all(one is None for one in keys.values()):
        raise ValueError(f"{_OP}: nothing to convert: every key says None; {DEFAULT!r} is the key of all that no other matches")
    targets = list(targets_of(model, named=list(keys)))
    decided = [matching_key(config, target.parameter_fqn, target.module_fqn) for target in targets]
    names = [name for name, _ in model.named_modules() if name]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    _check_keys(config, targets, decided, names, _other_names(model))
    chosen: list[Choice] = []
    for target, key in zip(targets, decided):
        one = None if key is None else keys[key]
        reason = "no key matches" if key is None else f"{key!r} says None" if one is None else ""
        if one is not None and not target.is_linear and not target.accepts(one):
            if key == target.parameter_fqn:
                raise TypeError(
                    f"{_OP}: {key} is a parameter of experts, and MXLinearConfig is for nn.Linear; give it an "
                    "MXFP8GroupedMMConfig or a recipe"
                )
            reason = f"{type(one).__name__} is for linears"
        if one is not None and target.obstacle:
            if key in (target.fqn, target.parameter_fqn):
                raise TypeError(f"{_OP}: {key} cannot be converted: {target.obstacle}")
            reason = target.obstacle
        chosen.append((target, None if reason else one, reason))
    used = {key for (_, one, _), key in zip(chosen, decided) if one is not None}
    for key, one in keys.items():
        if one is not None and key not in used and key in decided:
            obstacles = [target for target, by in zip(targets, decided) if by == key and target.obstacle == LONE_WEIGHT]
            why = f"; {obstacles[0].parameter_fqn} is {LONE_WEIGHT}" if obstacles else ""
            raise ValueError(f"{_OP}: key {key!r} converts nothing: {type(one).__name__} suits nothing that it matches{why}")
    return chosen


def _other_names(model: nn.Module) -> dict[str, str]:
    """Maps every further name of a module to its first name, under which the module is converted."""
    first: dict[int, str] = {}
    names = [(name, first.setdefault(id(module), name)) for name, module in model.named_modules(remove_duplicate=False)]
    return {name: known for name, known in names if name != known}


def _check_keys(
    config: FqnToConfig, targets: list[Target], decided: list[str | None], names: list[str], other_names: dict[str, str]
) -> None:
    for key in config.fqn_to_config:
        if key == DEFAULT:
            continue
        matched = names_matched(key, names)
        for name in (key, key.rpartition(".")[0]):
            if key not in decided and name in other_names:
                raise ValueError(f"{_OP}: key {key!r} is of a module with two names; its first is {other_names[name]!r}")
        if not matched:
            raise ValueError(f"{_OP}: key {key!r} matches no module and no parameter of the model{closest(key, names)}")
        for target in targets:
            if target.is_own and key.rpartition(".")[0] == target.module_fqn and key.rpartition(".")[2] in ("w13", "w2"):
                raise ValueError(
                    f"{_OP}: key {key!r} is one weight of a GroupedExperts, which has one recipe for both; the key "
                    f"{target.fqn!r} is both"
                )
        if key in decided:
            continue
        inside = [
            target
            for target in targets
            if any(
                name in (target.parameter_fqn, target.module_fqn) or target.module_fqn.startswith(f"{name}.") for name in matched
            )
        ]
        if not inside:
            raise ValueError(
                f"{_OP}: key {key!r} matches {', '.join(matched[:3])}, where there is no nn.Linear and no 3D parameter to convert"
            )
        warnings.warn(f"{_OP}: key {key!r} decides nothing: other keys win for all that it matches", stacklevel=4)


def _check(chosen: list[Choice], gathered: set[int]) -> None:
    """Raises if a chosen target cannot be converted, before anything changes. `gathered` holds the ids of the DTensors that FSDP2
    replaces by plain tensors during a forward."""
    tied: dict[int, tuple[str, AnyConfig | None]] = {}
    for target, config, _ in chosen:
        if target.kind == "parameter":
            name, other = tied.setdefault(id(target.parameter), (target.fqn, config))
            if other != config:
                raise ValueError(
                    f"{_OP}: {name} and {target.fqn} are one parameter, which cannot be converted in two ways, or "
                    "under one of its names alone; choose the same for both"
                )
        if config is None:
            continue
        if target.parameter.dtype not in (torch.bfloat16, torch.float32):
            raise TypeError(
                f"{_OP}: {target.parameter_fqn} must be torch.bfloat16 or torch.float32 to be quantized, got "
                f"{target.parameter.dtype}"
            )
        sharded = any_dtensor(target.parameter)
        if target.kind == "parameter" and type(target.parameter) is not nn.Parameter and not is_converted(target.parameter):
            if not sharded:
                raise TypeError(
                    f"{_OP}: {target.parameter_fqn} must be an nn.Parameter, got {type(target.parameter).__name__}; convert a "
                    "model before it is sharded"
                )
            if id(target.parameter) not in gathered:
                raise TypeError(
                    f"{_OP}: {target.parameter_fqn} is a DTensor that stays sharded while torch multiplies by it; call "
                    "moxie.grouped_mm, which takes DTensors, or use moxie.nn.GroupedExperts"
                )
        if sharded and wants_cache(config):
            raise ValueError(
                f"{_OP}: {target.parameter_fqn} is sharded, and a weight cache is of the whole weight; without weight_cache it "
                "is quantized in every forward"
            )
        if wants_cache(config) and target.kind == "parameter":
            taken = getattr(target.module, f"{target.name}_cache", None)
            if target.parameter.dim() == 2:
                raise ValueError(f"{_OP}: {target.fqn} is a matrix, and weight_cache is for linears and 3D parameters")
            if hasattr(target.module, f"{target.name}_cache") and not isinstance(taken, WeightCache):
                raise ValueError(
                    f"{_OP}: the weight cache of {target.fqn} would be its module's {target.name}_cache, which there "
                    f"is already, a {type(taken).__name__}"
                )
        if 0 in target.parameter.shape:
            raise ValueError(f"{_OP}: {target.parameter_fqn} must not be empty, got {tuple(target.parameter.shape)}")


def _convert(target: Target, config: AnyConfig | None, reason: str, tied: dict[int, Conversion | None]) -> Entry:
    """Converts the target, unless `config` is None, and returns its entry of the report.

    `tied` maps the id of each parameter seen so far to its conversion. The elements of a parameter with several names are
    counted once, under its first name.
    """
    parameter = target.parameter
    numel = 0 if id(parameter) in tied else target.numel
    conversion = target.conversion if config is None else target.convert_(config, tied.get(id(parameter)))
    tied[id(parameter)] = conversion
    return Entry(target.fqn, target.kind, tuple(parameter.shape), numel, conversion, reason)


def _forget(model: nn.Module, kinds: tuple[type, ...] = (NoteForward,)) -> None:
    """Removes the forward hooks of these classes from the module."""
    for hooks in (model._forward_hooks, model._forward_pre_hooks):
        for key in [key for key, hook in hooks.items() if isinstance(hook, kinds)]:
            del hooks[key]


def unquantize_(model: nn.Module) -> nn.Module:
    """Restores the original modules and parameters in place; the trained weights stay.

    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    >>> report = moxie.quantize_(model, "mxfp8_rceil")
    >>> type(moxie.unquantize_(model)[0]).__name__
    'Linear'
    """
    model = getattr(model, "_orig_mod", model)
    _forget(model, (WarnUnused, BeginStep))
    for module in list(model.modules()):
        if isinstance(module, MXLinear):
            module.to_float()
        if isinstance(module, GroupedExperts) and hasattr(module, "_recipe_before"):
            recipe, cached = module.__dict__.pop("_recipe_before")
            del module._conversion
            _forget(module)
            module.set_recipe_(recipe, weight_cache=cached)
        for name in list(module.__dict__.get("_moxie_converted", ())):
            restore_parameter_(module, name)
    return model
