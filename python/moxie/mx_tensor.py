"""MXTensor: a quantized tensor that autograd sees in its original dtype.

No FP8 tensor is differentiable here: the gradient of an MXTensor has `orig_dtype`, and goes on to the tensor that was quantized.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import allow_in_graph

from moxie import gemm
from moxie.mx_load import rebuild
from moxie.ops import Block, Rule, dequantize_rowwise, quantize_rowwise

_OP = "MXTensor"
_BLOCKS = {"1x32": (1, 32), "32x32": (32, 32), "1x128": (1, 128), "128x32": (128, 32), "128x128": (128, 128)}
_DTYPES = (torch.bfloat16, torch.float32)


def _shape_of_scale(shape: torch.Size, block: str) -> tuple[int, ...]:
    rows, cols = _BLOCKS[block]
    return (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // cols))


def _check(qdata: Tensor, scale: Tensor, orig_dtype: torch.dtype, block: str) -> None:
    if block not in _BLOCKS:
        raise ValueError(f"{_OP}: block must be one of {', '.join(_BLOCKS)}, got {block!r}")
    if qdata.dtype != torch.float8_e4m3fn:
        raise TypeError(f"{_OP}: qdata must be torch.float8_e4m3fn, got {qdata.dtype}")
    if scale.dtype != torch.float8_e8m0fnu:
        hint = "; bytes become scales with scale.view(torch.float8_e8m0fnu)" if scale.dtype == torch.uint8 else ""
        raise TypeError(f"{_OP}: scales must be torch.float8_e8m0fnu, got {scale.dtype}{hint}")
    if orig_dtype not in _DTYPES:
        raise TypeError(f"{_OP}: orig_dtype must be torch.bfloat16 or torch.float32, got {orig_dtype}")
    if qdata.dim() < 2:
        raise ValueError(f"{_OP}: qdata must have at least 2 dims, got {qdata.dim()}")
    expected = _shape_of_scale(qdata.shape, block)
    if tuple(scale.shape) != expected:
        larger = scale.numel() > torch.Size(expected).numel()
        hint = "; swizzled scales become plain ones with moxie.unswizzle_scale" if larger else ""
        raise ValueError(
            f"{_OP}: scales of qdata {tuple(qdata.shape)} in blocks of {block} must be {expected}, got {tuple(scale.shape)}{hint}"
        )
    if qdata.device != scale.device:
        raise ValueError(f"{_OP}: qdata and scales must be on one device, got {qdata.device} and {scale.device}")


class MXTensor(Tensor):
    """e4m3 elements and e8m0 scales, rowwise and plain, as `quantize_rowwise` gives them.

    `moxie.grouped_mm` takes it as x without quantizing again, and wgrad needs no other copy. Other arithmetic is refused: call
    `dequantize()` first.

    >>> x = torch.randn(64, 96, dtype=torch.bfloat16, requires_grad=True)
    >>> mx = moxie.MXTensor.to_mx(x)
    >>> mx.dtype, mx.qdata.dtype, mx.scale.shape
    (torch.bfloat16, torch.float8_e4m3fn, torch.Size([64, 3]))
    >>> mx.dequantize().sum().backward()
    >>> x.grad.dtype
    torch.bfloat16
    """

    qdata: Tensor
    scale: Tensor
    block: str

    @staticmethod
    def __new__(cls, qdata: Tensor, scale: Tensor, orig_dtype: torch.dtype, block: str = "1x32"):
        return Tensor._make_wrapper_subclass(
            cls, qdata.shape, strides=qdata.stride(), dtype=orig_dtype, device=qdata.device, requires_grad=False
        )

    def __init__(self, qdata: Tensor, scale: Tensor, orig_dtype: torch.dtype, block: str = "1x32"):
        self.qdata, self.scale, self.block = qdata, scale, block

    @staticmethod
    def from_qdata_and_scales(
        qdata: Tensor,
        scales: Tensor,
        orig_dtype: torch.dtype,
        *,
        block: Block = "1x32",
        block_size: int | None = None,
        is_swizzled_scales: bool = False,
    ) -> "MXTensor":
        """Wraps quantized elements and their scales. `block_size` is torchao's way to give the block: 32 is 1x32, 128 is 1x128.

        >>> qdata, scale = moxie.quantize_rowwise(torch.randn(64, 96))
        >>> moxie.MXTensor.from_qdata_and_scales(qdata, scale, torch.bfloat16).shape
        torch.Size([64, 96])
        """
        if is_swizzled_scales:
            raise ValueError(f"{_OP}: scales must be plain; moxie.unswizzle_scale(scales, rows, cols) makes them so")
        return _wrap(qdata, scales, orig_dtype, block if block_size is None else f"1x{block_size}")

    @staticmethod
    def to_mx(
        x: Tensor,
        elem_dtype: torch.dtype = torch.float8_e4m3fn,
        block_size: int | None = None,
        scaling_mode: Any = None,
        *,
        block: Block = "1x32",
        rule: Rule = "rceil",
    ) -> "MXTensor":
        """Quantizes x. Differentiable: the gradient passes through unchanged.

        `block_size` and `scaling_mode` are torchao's ways to give `block` and `rule`. Elements are always e4m3.
        """
        if elem_dtype != torch.float8_e4m3fn:
            raise TypeError(f"{_OP}: elem_dtype must be torch.float8_e4m3fn, got {elem_dtype}")
        mode = getattr(scaling_mode, "value", scaling_mode)
        return _to_mx(x, block if block_size is None else f"1x{block_size}", rule if mode is None else mode)

    def dequantize(self, output_dtype: torch.dtype | None = None) -> Tensor:
        """Returns a plain tensor, by default of `orig_dtype`. Differentiable."""
        return _dequantize(self, output_dtype)

    @property
    def orig_dtype(self) -> torch.dtype:
        return self.dtype

    def __repr__(self, *, tensor_contents=None) -> str:  # type: ignore[override]
        return (
            f"MXTensor(shape={tuple(self.shape)}, dtype={self.dtype}, block={self.block}, device={self.device}, "
            f"requires_grad={self.requires_grad})"
        )

    def __tensor_flatten__(self):
        return ["qdata", "scale"], (self.dtype, self.block)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, outer_size, outer_stride) -> "MXTensor":
        return MXTensor(inner["qdata"], inner["scale"], *context)

    def __reduce_ex__(self, protocol):
        parts = [tensor.detach().view(torch.uint8) for tensor in (self.qdata, self.scale)]
        return rebuild, (*parts, self.dtype, self.block, self.requires_grad)

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        return memo[id(self)]

    def share_memory_(self) -> "MXTensor":
        """Shares the memory of qdata and scale with other processes; the wrapper itself has none."""
        for part in (self.qdata, self.scale):
            part.share_memory_()
        return self

    def is_shared(self) -> bool:
        return self.qdata.is_shared() and self.scale.is_shared()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        from moxie.mx_ops import IMPLEMENTATIONS

        implementation = IMPLEMENTATIONS.get(func)
        if implementation is None:
            raise NotImplementedError(f"{_OP}: {func} is not defined on quantized values; call dequantize() first")
        return implementation(func, *args, **(kwargs or {}))


def as_matrix(mx: MXTensor) -> tuple[Tensor, Tensor]:
    """qdata and scale as matrices, or as stacks of them. Leading dims may be joined where blocks are one row tall."""
    if mx.dim() == 2 or mx.dim() == 3:
        return mx.qdata, mx.scale
    return mx.qdata.reshape(-1, mx.shape[-1]), mx.scale.reshape(-1, mx.scale.shape[-1])


class _ToMX(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block, rule):
        matrix = x if x.dim() in (2, 3) else x.reshape(-1, x.shape[-1])
        qdata, scale = quantize_rowwise(matrix, block=block, rule=rule)
        return MXTensor(qdata.view(x.shape), scale.view(_shape_of_scale(x.shape, block)), x.dtype, block)

    @staticmethod
    def backward(ctx, dy):
        return dy, None, None


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mx, dtype):
        ctx.dtype = mx.dtype
        return dequantize_rowwise(*as_matrix(mx), block=mx.block, dtype=dtype).view(mx.shape)

    @staticmethod
    def backward(ctx, dy):
        return dy.to(ctx.dtype), None


# Dynamo puts calls of these into its graph as they are, so it need not trace how they wrap and unwrap the subclass.


@allow_in_graph
def _wrap(qdata: Tensor, scale: Tensor, orig_dtype: torch.dtype, block: str) -> MXTensor:
    _check(qdata, scale, orig_dtype, block)
    return MXTensor(qdata, scale, orig_dtype, block)


@allow_in_graph
def _to_mx(x: Tensor, block: str, rule: str) -> MXTensor:
    if block not in _BLOCKS or x.dim() < 2 or (x.dim() > 3 and _BLOCKS[block][0] != 1):
        raise ValueError(
            f"{_OP}: to_mx takes [..., rows, cols] in blocks one row tall, or [rows, cols] and [G, N, K] in any of "
            f"{', '.join(_BLOCKS)}, got {tuple(x.shape)} and {block!r}"
        )
    if x.dtype not in _DTYPES:
        raise TypeError(f"{_OP}: x must be torch.bfloat16 or torch.float32, got {x.dtype}")
    return _ToMX.apply(x, block, rule)


@allow_in_graph
def _dequantize(mx: MXTensor, dtype: torch.dtype | None) -> Tensor:
    dtype = mx.dtype if dtype is None else dtype
    if dtype not in _DTYPES:
        raise TypeError(f"{_OP}: dequantize gives torch.bfloat16 or torch.float32, got {dtype}")
    return _Dequantize.apply(mx, dtype)


@allow_in_graph
def multiply(
    x: MXTensor,
    w: Tensor,
    offs: Tensor | None,
    recipe: str,
    bias: Tensor | None,
    dtype: torch.dtype | None,
    quantized_w: Sequence[Tensor] | None,
    main_grad: Tensor | None,
) -> Tensor:
    """grouped_mm of an MXTensor. The op takes x for autograd, and qdata and scale for their values."""
    return torch.ops.moxie.grouped_mm.mx(
        x,
        x.qdata,
        x.scale,
        w,
        offs,
        block=x.block,
        recipe=recipe,
        bias=bias,
        dtype=dtype,
        quantized_w=quantized_w,
        main_grad=main_grad,
    )


gemm.MX_TYPES = (MXTensor,)
