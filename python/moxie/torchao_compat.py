"""torchao's names, with the same arguments in the same order. torchao's own quantize_ accepts Moxie's configs too.

Weights have the layout of torchao's functions: B_t is [G, K, N]. Groups need no alignment, so flags about padding have no effect.
docs/CONVERSION.md maps torchao's names to Moxie's.
"""

import random

import torch
from torch import Tensor, nn

from moxie.config import (
    FP8GroupedMMConfig,
    FP8GroupedMMRecipe,
    GroupedMMConfig,
    KernelPreference,
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    MXFP8GroupedMMConfig,
    MXFP8GroupedMMRecipe,
    MXLinearConfig,
    MXLinearRecipeName,
    ScaleCalculationMode,
)
from moxie.convert import quantize_, targets_of, unquantize_
from moxie.fqn import FqnToConfig
from moxie.gemm import grouped_mm
from moxie.linear import MXLinear
from moxie.mx_tensor import MXTensor, with_gradient_to
from moxie.torchao_linear import MXFP8Linear
from moxie.torchao_objects import config_from_torchao

# torchao renamed these configs later; both names work.
TrainingOpBaseConfig = GroupedMMConfig
MXFP8TrainingOpConfig = MXFP8GroupedMMConfig
Float8TrainingOpConfig = FP8GroupedMMConfig
MXFP8TrainingRecipe = MXFP8GroupedMMRecipe
Float8TrainingRecipe = FP8GroupedMMRecipe

__all__ = [
    "FP8GroupedMMConfig",
    "FP8GroupedMMRecipe",
    "Float8TrainingOpConfig",
    "Float8TrainingRecipe",
    "FqnToConfig",
    "GroupedMMConfig",
    "KernelPreference",
    "MXFP8Dim0CastKernelChoice",
    "MXFP8Dim1CastKernelChoice",
    "MXFP8GroupedMMConfig",
    "MXFP8GroupedMMRecipe",
    "MXFP8Linear",
    "MXFP8TrainingOpConfig",
    "MXFP8TrainingRecipe",
    "MXLinear",
    "MXLinearConfig",
    "MXLinearRecipeName",
    "MXTensor",
    "ScaleCalculationMode",
    "TrainingOpBaseConfig",
    "_quantize_then_scaled_grouped_mm",
    "_to_fp8_rowwise_then_scaled_grouped_mm",
    "_to_mxfp8_then_scaled_grouped_mm",
    "generate_jagged_offs",
    "quantize_",
    "to_mx",
    "unquantize_",
]


def _to_mxfp8_then_scaled_grouped_mm(
    A: Tensor | MXTensor,
    B_t: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = torch.bfloat16,
    kernel_preference: KernelPreference = KernelPreference.AUTO,
    wgrad_with_hp: bool = False,
    scale_calculation_mode: ScaleCalculationMode = ScaleCalculationMode.RCEIL,
    pad_token_groups_for_grouped_mm: bool = False,
    *,
    prequantized_A: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Multiplies A [M, K] by B_t [G, K, N], group by group. An MXTensor A, ours or torchao's, is not quantized again.

    `prequantized_A` is A quantized in blocks of 1x32: qdata, and the scales as e8m0 or bytes. It is used instead of A in forward
    and wgrad; A only receives the gradient. `bias` is [N], [G, N] for one per group, or [M, N] for one per row. If M equals G, a
    bias of that shape is one per row.
    """
    op = "_to_mxfp8_then_scaled_grouped_mm"
    recipe = _mxfp8_recipe(kernel_preference, out_dtype, wgrad_with_hp, scale_calculation_mode)
    if prequantized_A is not None:
        A = _prequantized(op, A, prequantized_A)
    return _multiply(op, A, B_t, recipe, offs, bias)


def _to_fp8_rowwise_then_scaled_grouped_mm(
    A: Tensor,
    B_t: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype | None = torch.bfloat16,
    float8_dtype: torch.dtype = torch.float8_e4m3fn,
    pad_token_groups_for_grouped_mm: bool = True,
) -> Tensor:
    return _multiply("_to_fp8_rowwise_then_scaled_grouped_mm", A, B_t, _fp8_recipe(float8_dtype, out_dtype), offs, None)


def _quantize_then_scaled_grouped_mm(
    A: Tensor | MXTensor,
    B_t: Tensor,
    config: GroupedMMConfig,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    op = "_quantize_then_scaled_grouped_mm"
    ours = config_from_torchao(config, op)
    if not isinstance(ours, GroupedMMConfig):
        raise TypeError(f"{op}: config must be an MXFP8GroupedMMConfig or FP8GroupedMMConfig, got {type(ours).__name__}")
    return _multiply(op, A, B_t, ours.recipe_text, offs, bias)


def _multiply(op: str, A: Tensor, B_t: Tensor, recipe: str, offs: Tensor | None, bias: Tensor | None) -> Tensor:
    if B_t.dim() != 3:
        raise ValueError(f"{op}: B_t must be [G, K, N], got {tuple(B_t.shape)}")
    w = B_t.transpose(-2, -1)
    if bias is not None and tuple(bias.shape) in ((1, w.shape[1]), (A.shape[0], w.shape[1])):  # [1, N] or [M, N]
        y = grouped_mm(A, w, offs, recipe=recipe)
        bias = bias.to(y.dtype)
        if offs is not None:  # rows past the last group are zero, with a bias too
            in_groups = torch.arange(y.shape[0], device=y.device).unsqueeze(1) < offs[-1]
            bias = torch.where(in_groups, bias, torch.zeros((), dtype=y.dtype, device=y.device))
        return y + bias
    return grouped_mm(A, w, offs, recipe=recipe, bias=bias)


def _prequantized(op: str, A: Tensor, parts: tuple[Tensor, Tensor]) -> MXTensor:
    """Makes an MXTensor of qdata and scale whose gradient flows to A."""
    if isinstance(A, MXTensor) or not isinstance(parts, (tuple, list)) or len(parts) != 2:
        raise TypeError(f"{op}: prequantized_A must be (qdata, scale) of A, a plain tensor; an MXTensor is given as A itself")
    qdata, scale = parts
    if tuple(qdata.shape) != tuple(A.shape):
        raise ValueError(
            f"{op}: the qdata of prequantized_A must have the shape of A, {tuple(A.shape)}, got {tuple(qdata.shape)}"
        )
    scale = scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale
    return with_gradient_to(A, MXTensor.from_qdata_and_scales(qdata, scale, A.dtype))


# The next two functions depend on their arguments only, so torch.compile takes their results as constants and does not trace
# them.


@torch.compiler.assume_constant_result
def _mxfp8_recipe(kernel_preference, out_dtype, wgrad_with_hp, scale_calculation_mode) -> str:
    return MXFP8GroupedMMConfig(
        kernel_preference=kernel_preference,
        out_dtype=out_dtype,
        wgrad_with_hp=wgrad_with_hp,
        scale_calculation_mode=scale_calculation_mode,
    ).recipe_text


@torch.compiler.assume_constant_result
def _fp8_recipe(float8_dtype, out_dtype) -> str:
    return FP8GroupedMMConfig(float8_dtype, out_dtype).recipe_text


def to_mx(
    data_hp: Tensor,
    elem_dtype: torch.dtype,
    block_size: int,
    scaling_mode: ScaleCalculationMode = ScaleCalculationMode.FLOOR,
    is_swizzled_scales: bool = False,
) -> tuple[Tensor, Tensor]:
    """Quantizes as `MXTensor.to_mx` does, with torchao's default rule, and returns (scale, qdata) in torchao's order."""
    mx = MXTensor.to_mx(data_hp.detach(), elem_dtype, block_size, scaling_mode, is_swizzled_scales=is_swizzled_scales)
    return mx.scale, mx.qdata


def generate_jagged_offs(
    E: int,
    M: int,
    multiple_of: int = 32,
    dtype: torch.dtype = torch.int32,
    device: str | torch.device | None = None,
) -> Tensor:
    """The exclusive ends of E groups of random sizes that add up to M rows. Sizes are multiples of `multiple_of`."""
    if M % multiple_of != 0:
        raise ValueError(f"generate_jagged_offs: M must be a multiple of multiple_of, {multiple_of}, got {M}")
    if E > M // multiple_of:
        raise ValueError(f"generate_jagged_offs: {M} rows are at most {M // multiple_of} groups of {multiple_of}, got {E}")
    ends = [*sorted(random.sample(range(multiple_of, M, multiple_of), E - 1)), M]
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
    return torch.tensor(ends, dtype=dtype, device=device)


def _convert_module(module: nn.Module, config, *, parameter_name: str | None = None) -> nn.Module:
    """Converts one module or parameter for torchao's quantize_, which calls this for every match of a key, exact keys first. A
    target that is already converted is therefore left as it is. A 2D parameter beside 3D parameters is their bias."""
    holds_experts = any(target.module is module and target.parameter.dim() == 3 for target in targets_of(module))
    for target in targets_of(module, named=[parameter_name] if parameter_name and not holds_experts else []):
        wanted = parameter_name is None or (target.module is module and target.name == parameter_name)
        if not wanted or target.obstacle or target.conversion is not None:
            continue
        if target.is_linear or not isinstance(config, MXLinearConfig):
            target.convert_(config)
    return module


def _register() -> bool:
    """Registers Moxie's configs with torchao's quantize_ and FqnToConfig. Returns False if torchao is not installed."""
    try:
        from torchao.core.config import AOBaseConfig
        from torchao.quantization.transform_module import register_quantize_module_handler
    except ImportError:
        return False
    for config in (MXFP8GroupedMMConfig, FP8GroupedMMConfig, MXLinearConfig):
        AOBaseConfig.register(config)
        register_quantize_module_handler(config)(_convert_module)
    return True


HAS_TORCHAO = _register()
