"""Makes FSDP2 gather weights in FP8, half the bytes of bf16. The shards stay in f32 or bf16.

Each rank quantizes its shard in square blocks, and every rank decodes what it gathers. The decoded weight holds e4m3 times a
power of two, which bf16 and f32 hold exactly, and quantizing it again in the same or smaller blocks changes no value: so forward
and dgrad multiply by the same weights, those that quantizing the whole master would give.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from moxie.distributed.agree import agree
from moxie.linear import MXLinear
from moxie.nn import GroupedExperts
from moxie.ops import dequantize_rowwise, quantize_rowwise
from moxie.recipe import Recipe

_OP = "quantize_all_gather_"
SquareBlock = Literal["32x32", "128x128"]
_SIDES: dict[SquareBlock, int] = {"32x32": 32, "128x128": 128}


def quantize_all_gather_(model: nn.Module, block: SquareBlock | None = None) -> list[str]:
    """Makes FSDP2 gather quantized weights in FP8, in `block`s of 32x32 or 128x128. Returns their names.

    Call it after `fully_shard`, on every rank. It concerns the weights of MXLinear, of `moxie.nn.GroupedExperts` and the
    parameters that `quantize_` has converted; all others are gathered as before. The default block is 128x128 if a recipe has
    blocks of 128, else 32x32. A shard that cuts a block, and a recipe whose blocks are larger, are refused. One rank gathers
    nothing: there the model is left as it is.

    >>> for layer in model.layers:                                         # doctest: +SKIP
    ...     torch.distributed.fsdp.fully_shard(layer)
    >>> torch.distributed.fsdp.fully_shard(model)                          # doctest: +SKIP
    >>> moxie.distributed.quantize_all_gather_(model)                      # doctest: +SKIP
    """
    chosen: list[tuple[str, Any, SquareBlock]] = []

    def describe() -> dict[str, object]:
        if block is not None and block not in _SIDES:
            raise ValueError(f"{_OP}: block must be 32x32 or 128x128, got {block!r}")
        chosen.extend(_choose(model, block))
        found = {f"the block of {name}": one for name, _, one in chosen}
        return {**found, **{f"the shape of {name}": tuple(param._orig_size) for name, param, _ in chosen}}

    group = _group_of(model)
    agree(_OP, group, describe)
    if group.size() == 1:
        return []
    for _, param, one in chosen:
        _attach(param, one)
    for module in model.modules():
        own = _params_of(module) if isinstance(module, FSDPModule) else []
        if params := [(name, param, one) for name, param, one in chosen if param in own]:
            _attach_before_forward(module, params)
    return [name for name, _, _ in chosen]


def _group_of(model: nn.Module):
    for param in sharded_parameters(model):
        return param.shard_mesh.get_group()
    raise ValueError(f"{_OP}: the model must be sharded by torch.distributed.fsdp.fully_shard first, got {type(model).__name__}")


def _params_of(module: FSDPModule) -> list[Any]:
    """Returns FSDP2's own records of the parameters that the module gathers."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # newer versions of torch have several groups, older ones have one
    if groups is None:
        groups = [group for group in [state._fsdp_param_group] if group is not None]
    return [param for group in groups for param in group.fsdp_params]


def sharded_parameters(model: nn.Module) -> list[Any]:
    return [param for module in model.modules() if isinstance(module, FSDPModule) for param in _params_of(module)]


def _recipe_of(module: nn.Module, name: str) -> str | None:
    """Returns the recipe of the products with the parameter, or None if Moxie does not multiply by it."""
    if isinstance(module, MXLinear):
        return module.conversion.recipe if name == "weight" else None
    if isinstance(module, GroupedExperts):
        return module.recipe if name in ("w13", "w2") else None
    conversion = module.__dict__.get("_moxie_converted", {}).get(name)
    return None if conversion is None else conversion.recipe


def _choose(model: nn.Module, block: SquareBlock | None) -> Iterator[tuple[str, Any, SquareBlock]]:
    names = {id(module): name for name, module in model.named_modules()}
    found = False
    for param in sharded_parameters(model):
        owner, name = param._module_info.module, param._module_info.param_name
        recipe = _recipe_of(owner, name)
        if recipe is None or not _has_blocks(recipe):
            continue
        fqn = f"{names[id(owner)]}.{name}".lstrip(".")
        if hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
            raise ValueError(f"{_OP}: {fqn} is gathered quantized already")
        found = True
        yield fqn, param, _checked(fqn, param, recipe, block)
    if not found:
        raise ValueError(
            f"{_OP}: the model must hold a sharded weight that a recipe quantizes in blocks; convert it with quantize_"
        )


def _has_blocks(recipe: str) -> bool:
    return recipe.partition(":")[0] != "identity" and Recipe.from_name(recipe).scaling == "block"


def _checked(fqn: str, param: Any, text: str, block: SquareBlock | None) -> SquareBlock:
    """Returns the block in which to gather the parameter. Raises if that would lose accuracy or cut a block."""
    recipe = Recipe.from_name(text)
    rows, cols = (int(side) for side in recipe.weights.split("x"))
    block = ("128x128" if max(rows, cols) == 128 else "32x32") if block is None else block
    side = _SIDES[block]
    if max(rows, cols) > side:
        raise ValueError(
            f"{_OP}: {fqn} is quantized in blocks of {recipe.weights}, and gathering it in {block} would round it twice; gather "
            "it in 128x128"
        )
    if recipe.rule not in ("rceil", "ceil") and recipe.weights != block:
        raise ValueError(
            f"{_OP}: {fqn} is quantized in {recipe.weights} by the rule {recipe.rule}, which may saturate again what was "
            f"gathered in {block}; rceil and ceil do not"
        )
    size, ranks, dim = param._orig_size, param.shard_mesh.size(), param.fsdp_placement.dim
    if dim != 0:
        raise ValueError(f"{_OP}: {fqn} must be sharded over dim 0, got {dim}; FSDP2 joins other shards element by element")
    if size[0] % ranks:
        raise ValueError(f"{_OP}: dim 0 of {fqn} must divide among the {ranks} ranks, got {size[0]}")
    if len(size) == 2 and ranks > 1 and (size[0] // ranks) % side:
        raise ValueError(
            f"{_OP}: a shard of {fqn} must hold whole blocks of {side} rows, got {size[0] // ranks}: {size[0]} rows over "
            f"{ranks} ranks"
        )
    return block


def _attach(param: Any, block: SquareBlock) -> None:
    """Sets FSDP2's hooks fsdp_pre_all_gather and fsdp_post_all_gather as attributes of the parameter's local shard. The shard
    stays a plain tensor, and the state dict does not change."""
    local = param._sharded_local_tensor
    rule = Recipe.from_name(_recipe_of(param._module_info.module, param._module_info.param_name) or "").rule

    def pre(mesh, outer_size, outer_stride, module, mp_policy):
        # Read the shard anew each time, because loading or moving the model replaces it.
        shard = param._sharded_local_tensor.detach()
        qdata, scale = quantize_rowwise(_stacked(shard), block=block, rule=rule)
        return (qdata.view(torch.uint8), scale.view(torch.uint8)), (tuple(outer_size), scale.shape)

    def post(outputs, metadata, param_dtype, *, out=None):
        size, scale_shape = metadata
        qdata, scale = (output.view(torch.uint8) for output in outputs)
        matrices = (1, *size) if len(size) == 2 else tuple(size)
        scale = scale.view(*_scale_shape(matrices, scale_shape))
        weight = dequantize_rowwise(
            qdata.view(matrices).view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu), block=block, dtype=param_dtype
        ).view(size)
        if out is None:
            return weight, (weight,)
        target = out._local_tensor if isinstance(out, DTensor) else out
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(target):
            target.copy_(weight)  # from the second gather on, FSDP2 keeps its parameter and ignores what this returns
        return None

    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = pre, post
    param._init_extensions()


def _stacked(shard: Tensor) -> Tensor:
    return shard.unsqueeze(0) if shard.dim() == 2 else shard


def _scale_shape(matrices: tuple[int, ...], of_shard: torch.Size) -> tuple[int, int, int]:
    """Returns the shape of the whole weight's scales, given that of a shard's: ranks join whole matrices, or blocks of rows of
    one matrix."""
    return (matrices[0], -1, of_shard[2])


def _attach_before_forward(module: nn.Module, params: list[tuple[str, Any, SquareBlock]]) -> None:
    """Before each forward of the module, sets the hooks again where loading or moving the model has replaced a local shard.
    Raises if the model was converted otherwise since: its products would multiply by weights that were rounded for the old
    recipe."""

    def attach(*_) -> None:
        for fqn, param, block in params:
            recipe = _recipe_of(param._module_info.module, param._module_info.param_name)
            if recipe is None or not _has_blocks(recipe):
                raise ValueError(
                    f"{_OP}: {fqn} is gathered in FP8, and the model was unquantized since; unquantize_ a model before "
                    f"{_OP}, or shard it anew"
                )
            _checked(fqn, param, recipe, block)
            if not hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
                _attach(param, block)

    module.register_forward_pre_hook(torch._dynamo.disable(attach), prepend=True)
