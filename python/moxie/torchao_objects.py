"""Converts torchao's configs and tensors to Moxie's. Their classes are recognised by name, so torchao is not imported."""

from typing import TypeVar

import torch
from torch import Tensor

from moxie.config import AnyConfig, FP8GroupedMMConfig, MXFP8GroupedMMConfig, MXLinearConfig

_CONFIGS: dict[str, type] = {
    "MXFP8TrainingOpConfig": MXFP8GroupedMMConfig,
    "MXFP8GroupedMMConfig": MXFP8GroupedMMConfig,
    "Float8TrainingOpConfig": FP8GroupedMMConfig,
    "FP8GroupedMMConfig": FP8GroupedMMConfig,
    "MXLinearConfig": MXLinearConfig,
}
_FIELDS = (
    "kernel_preference",
    "out_dtype",
    "wgrad_with_hp",
    "scale_calculation_mode",
    "pad_token_groups_for_grouped_mm",
    "float8_dtype",
    "float8_linear_recipe",
    "block_size",
    "elem_dtype",
    "elem_dtype_weight_override",
    "elem_dtype_grad_output_override",
    "mxfp8_dim0_cast_kernel_choice",
    "mxfp8_dim1_cast_kernel_choice",
)

Given = TypeVar("Given")


def is_torchao(value: object) -> bool:
    return type(value).__module__.startswith("torchao.")


def config_from_torchao(config: Given, op: str) -> Given | AnyConfig:
    """Converts a training config of torchao to Moxie's config with the same fields. Returns anything else unchanged."""
    if not is_torchao(config) or hasattr(config, "fqn_to_config"):
        return config
    kind = _CONFIGS.get(type(config).__name__)
    if kind is None:
        raise TypeError(
            f"{op}: {type(config).__name__} of torchao trains in no recipe that Moxie has; give an MXFP8GroupedMMConfig, "
            "FP8GroupedMMConfig or MXLinearConfig of moxie.torchao_compat, or convert those modules with torchao's own quantize_"
        )
    return kind(**{name: getattr(config, name) for name in _FIELDS if hasattr(config, name)})


def parts_from_torchao(x: Tensor, op: str) -> tuple[Tensor, Tensor, torch.dtype, int]:
    """Returns qdata, scale, orig_dtype and block_size of a torchao MXTensor."""
    if x.requires_grad:
        raise ValueError(
            f"{op}: torchao's MXTensor passes no gradient on to what was quantized; make x with "
            "moxie.MXTensor.to_mx, which does, or give x.detach()"
        )
    qdata, scale, elem_dtype, block_size = (getattr(x, name) for name in ("qdata", "scale", "elem_dtype", "block_size"))
    if elem_dtype != torch.float8_e4m3fn:
        raise TypeError(f"{op}: the elements of an MXTensor must be torch.float8_e4m3fn, got {elem_dtype}; give x.dequantize()")
    if getattr(x, "is_swizzled_scales", False):
        raise ValueError(
            f"{op}: the scales of an MXTensor must be plain, and torchao's are swizzled here; make x with "
            "is_swizzled_scales=False, or give x.dequantize()"
        )
    return qdata, scale, x.dtype, block_size
