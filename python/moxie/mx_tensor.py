"""MXTensor: a quantized tensor that autograd sees in its original dtype.

The gradient of an MXTensor has the dtype `orig_dtype`, and flows on to the tensor that was quantized. FP8 tensors themselves have
no gradient.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import allow_in_graph

from moxie import gemm
from moxie.mx_load import rebuild
from moxie.ops import Block, Rule, dequantize_rowwise, quantize_rowwise
from moxie.torchao_objects import parts_from_torchao

_OP = "MXTensor"
_BLOCKS = {"1x32": (1, 32), "32x32": (32, 32), "1x128": (1, 128), "128x32": (128, 32), "128x128": (128, 128)}
# Maps the block of a transposed MXTensor, which only t() makes, to the block before the transpose.
_TRANSPOSED = {"32x1": "1x32", "32x32": "32x32", "128x1": "1x128", "32x128": "128x32", "128x128": "128x128"}
_ROWS_COLS = _BLOCKS | {block: _BLOCKS[of][::-1] for block, of in _TRANSPOSED.items()}
_DTYPES = (torch.bfloat16, torch.float32)


def _shape_of_scale(shape: torch.Size, block: str) -> tuple[int, ...]:
    rows, cols = _ROWS_COLS[block]
    above = () if len(shape) == 1 else (*shape[:-2], -(-shape[-2] // rows))
    return (*above, -(-shape[-1] // cols))


def _block_of(block_size: int | None, block: str) -> str:
    """Returns the block. torchao's callers give it as `block_size`: 32 is 1x32, 128 is 1x128."""
    if block_size is None:
        return block
    if block_size not in (32, 128):
        raise ValueError(
            f"{_OP}: block_size must be 32, the block of the MX format, or 128 (four of those that share a scale), got "
            f"{block_size}; values in other blocks are given as plain tensors: quantize and dequantize them with torchao"
        )
    return f"1x{block_size}"


def _check_torchao(act_quant_kwargs: object, is_swizzled_scales: bool, plain: str) -> None:
    if act_quant_kwargs is not None:
        raise ValueError(
            f"{_OP}: act_quant_kwargs must be None: how activations are quantized is for the recipe of the product to say, "
            f"got {act_quant_kwargs!r}"
        )
    if is_swizzled_scales:
        raise ValueError(f"{_OP}: scales must be plain, got is_swizzled_scales=True; {plain}")


def _check(qdata: Tensor, scale: Tensor, orig_dtype: torch.dtype, block: str) -> None:
    if block not in _ROWS_COLS:
        raise ValueError(f"{_OP}: block must be one of {', '.join(_BLOCKS)}, got {block!r}")
    if qdata.dtype != torch.float8_e4m3fn:
        raise TypeError(f"{_OP}: qdata must be torch.float8_e4m3fn, got {qdata.dtype}")
    if scale.dtype != torch.float8_e8m0fnu:
        hint = "; bytes become scales with scale.view(torch.float8_e8m0fnu)" if scale.dtype == torch.uint8 else ""
        raise TypeError(f"{_OP}: scales must be torch.float8_e8m0fnu, got {scale.dtype}{hint}")
    if orig_dtype not in _DTYPES:
        raise TypeError(f"{_OP}: orig_dtype must be torch.bfloat16 or torch.float32, got {orig_dtype}")
    least = 1 if _ROWS_COLS[block][0] == 1 else 2
    if qdata.dim() < least:
        raise ValueError(f"{_OP}: qdata in blocks of {block} must have at least {least} dims, got {qdata.dim()}")
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
    """A tensor of e4m3 elements with e8m0 scales, rowwise and in the plain layout, as `quantize_rowwise` makes them.

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
    kernel_preference: Any  # an attribute of torchao's MXTensor, kept but ignored: the recipe chooses the kernels
    act_quant_kwargs = None
    is_swizzled_scales = False

    @staticmethod
    def __new__(cls, qdata: Tensor, scale: Tensor, *args: Any, **kwargs: Any):
        """MXTensor(qdata, scale, orig_dtype, block="1x32", kernel_preference=None), or torchao's MXTensor(qdata, scale,
        elem_dtype, block_size, orig_dtype, kernel_preference, act_quant_kwargs, is_swizzled_scales)."""
        is_torchao = "elem_dtype" in kwargs or (bool(args) and args[0] not in _DTYPES)
        read = _read_torchao if is_torchao else _read_ours
        orig_dtype, block, preference = read(qdata, scale, *args, **kwargs)
        mx = Tensor._make_wrapper_subclass(
            cls, qdata.shape, strides=qdata.stride(), dtype=orig_dtype, device=qdata.device, requires_grad=False
        )
        mx.qdata, mx.scale, mx.block, mx.kernel_preference = qdata, scale, block, preference
        return mx

    @staticmethod
    def from_qdata_and_scales(
        qdata: Tensor,
        scales: Tensor,
        orig_dtype: torch.dtype,
        *,
        block: Block = "1x32",
        block_size: int | None = None,
        kernel_preference: Any = None,
        act_quant_kwargs: None = None,
        is_swizzled_scales: bool = False,
    ) -> "MXTensor":
        """Wraps quantized elements and their scales. `block_size` is torchao's way to give the block: 32 is 1x32, 128 is 1x128.

        `kernel_preference` is kept as an attribute; the recipe of a product says which kernels it takes.

        >>> qdata, scale = moxie.quantize_rowwise(torch.randn(64, 96))
        >>> moxie.MXTensor.from_qdata_and_scales(qdata, scale, torch.bfloat16).shape
        torch.Size([64, 96])
        """
        _check_torchao(act_quant_kwargs, is_swizzled_scales, "moxie.unswizzle_scale(scales, rows, cols) makes them so")
        return _wrap(qdata, scales, orig_dtype, _block_of(block_size, block), kernel_preference)

    @staticmethod
    def to_mx(
        x: Tensor,
        elem_dtype: torch.dtype = torch.float8_e4m3fn,
        block_size: int | None = None,
        scaling_mode: Any = None,
        kernel_preference: Any = None,
        act_quant_kwargs: None = None,
        is_swizzled_scales: bool = False,
        mxfp8_dim0_cast_kernel_choice: Any = None,
        *,
        block: Block = "1x32",
        rule: Rule = "rceil",
    ) -> "MXTensor":
        """Quantizes x. Differentiable: the gradient passes through unchanged.

        `block_size` and `scaling_mode` are torchao's ways to give `block` and `rule`. Elements are always e4m3.
        `kernel_preference` is kept as an attribute; torchao's choice of a quantizer is without effect.
        """
        if elem_dtype != torch.float8_e4m3fn:
            raise TypeError(f"{_OP}: elem_dtype must be torch.float8_e4m3fn, got {elem_dtype}; Moxie has no other")
        _check_torchao(act_quant_kwargs, is_swizzled_scales, "moxie.swizzle_scale(mx.scale) makes swizzled ones of them")
        mode = getattr(scaling_mode, "value", scaling_mode)
        return _to_mx(x, _block_of(block_size, block), rule if mode is None else mode, kernel_preference)

    def dequantize(self, output_dtype: torch.dtype | None = None) -> Tensor:
        """Returns a plain tensor, by default of `orig_dtype`. Differentiable."""
        return _dequantize(self, output_dtype)

    @property
    def orig_dtype(self) -> torch.dtype:
        return self.dtype

    @property
    def elem_dtype(self) -> torch.dtype:
        return self.qdata.dtype

    @property
    def block_size(self) -> int:
        """The number of elements that share a scale, if blocks are one row tall (after `t()`, one column wide). Raises for other
        blocks."""
        if 1 not in _ROWS_COLS[self.block]:
            raise AttributeError(f"{_OP}: blocks of {self.block} have no block_size; `block` is their shape")
        return max(_ROWS_COLS[self.block])

    def __repr__(self, *, tensor_contents=None) -> str:  # type: ignore[override]
        return (
            f"MXTensor(shape={tuple(self.shape)}, dtype={self.dtype}, block={self.block}, device={self.device}, "
            f"requires_grad={self.requires_grad})"
        )

    def __tensor_flatten__(self):
        return ["qdata", "scale"], (self.dtype, self.block, self.kernel_preference)

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
        """Moves qdata and scale to shared memory. The MXTensor itself has no memory of its own."""
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


def _read_ours(
    qdata: Tensor, scale: Tensor, orig_dtype: torch.dtype, block: str = "1x32", kernel_preference: Any = None
) -> tuple[torch.dtype, str, Any]:
    return orig_dtype, block, kernel_preference


def _read_torchao(
    qdata: Tensor,
    scale: Tensor,
    elem_dtype: torch.dtype,
    block_size: int,
    orig_dtype: torch.dtype,
    kernel_preference: Any = None,
    act_quant_kwargs: None = None,
    is_swizzled_scales: bool = False,
) -> tuple[torch.dtype, str, Any]:
    if elem_dtype != qdata.dtype:
        raise TypeError(f"{_OP}: elem_dtype must be the dtype of qdata, {qdata.dtype}, got {elem_dtype}")
    _check_torchao(act_quant_kwargs, is_swizzled_scales, "moxie.unswizzle_scale(scale, rows, cols) makes them so")
    block = _block_of(block_size, "")
    _check(qdata, scale, orig_dtype, block)
    return orig_dtype, block, kernel_preference


def is_transposed(mx: MXTensor) -> bool:
    return mx.block not in _BLOCKS


def transpose(mx: MXTensor) -> MXTensor:
    """Transposes a matrix. The result is a view: no data is copied."""
    if mx.dim() != 2:
        raise NotImplementedError(f"{_OP}: t() is defined on matrices alone, got {tuple(mx.shape)}; call dequantize() first")
    rows, cols = _ROWS_COLS[mx.block]
    return MXTensor(mx.qdata.t(), mx.scale.t(), mx.dtype, f"{cols}x{rows}", mx.kernel_preference)


def as_matrix(mx: MXTensor) -> tuple[Tensor, Tensor]:
    """Returns qdata and scale as matrices, or as stacks of matrices. If blocks are one row tall, leading dims are flattened into
    the rows."""
    if mx.dim() == 2 or mx.dim() == 3:
        return mx.qdata, mx.scale
    return mx.qdata.reshape(-1, mx.shape[-1]), mx.scale.reshape(-1, mx.scale.shape[-1])


class _ToMX(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block, rule, kernel_preference):
        matrix = x if x.dim() in (2, 3) else x.reshape(-1, x.shape[-1])
        qdata, scale = quantize_rowwise(matrix, block=block, rule=rule)
        scale = scale.view(_shape_of_scale(x.shape, block))
        return MXTensor(qdata.view(x.shape), scale, x.dtype, block, kernel_preference)

    @staticmethod
    def backward(ctx, dy):
        return dy, None, None, None


class _WithGradientTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, qdata, scale, block):
        return MXTensor(qdata, scale, x.dtype, block)

    @staticmethod
    def backward(ctx, dy):
        return dy, None, None, None


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mx, dtype):
        ctx.dtype = mx.dtype
        if is_transposed(mx):
            return _Dequantize.apply(transpose(mx), dtype).t()
        return dequantize_rowwise(*as_matrix(mx), block=mx.block, dtype=dtype).view(mx.shape)

    @staticmethod
    def backward(ctx, dy):
        return dy.to(ctx.dtype), None


# Dynamo puts calls of allow_in_graph functions into the graph untraced: it cannot trace how they wrap and unwrap the subclass.


@allow_in_graph
def _wrap(qdata: Tensor, scale: Tensor, orig_dtype: torch.dtype, block: str, kernel_preference: Any) -> MXTensor:
    _check(qdata, scale, orig_dtype, block)
    return MXTensor(qdata, scale, orig_dtype, block, kernel_preference)


@allow_in_graph
def _to_mx(x: Tensor, block: str, rule: str, kernel_preference: Any) -> MXTensor:
    if block not in _BLOCKS or x.dim() == 0 or (x.dim() not in (2, 3) and _BLOCKS[block][0] != 1):
        raise ValueError(
            f"{_OP}: to_mx takes [..., cols] in blocks one row tall, or [rows, cols] and [G, N, K] in any of "
            f"{', '.join(_BLOCKS)}, got {tuple(x.shape)} and {block!r}"
        )
    if x.dtype not in _DTYPES:
        raise TypeError(f"{_OP}: x must be torch.bfloat16 or torch.float32, got {x.dtype}")
    return _ToMX.apply(x, block, rule, kernel_preference)


@allow_in_graph
def with_gradient_to(x: Tensor, mx: MXTensor) -> MXTensor:
    """Returns mx, the quantized form of x, connected to x so that its gradient flows on to x."""
    return _WithGradientTo.apply(x, mx.qdata, mx.scale, mx.block)


@allow_in_graph
def _dequantize(mx: MXTensor, dtype: torch.dtype | None) -> Tensor:
    dtype = mx.dtype if dtype is None else dtype
    if dtype not in _DTYPES:
        raise TypeError(
            f"{_OP}: dequantize gives torch.bfloat16 or torch.float32, got {dtype}; dequantize().to({dtype}) casts it"
        )
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
    """grouped_mm of an MXTensor, Moxie's or torchao's. The op uses x for autograd only; its values come from qdata and scale."""
    if not isinstance(x, MXTensor):
        qdata, scale, orig_dtype, block_size = parts_from_torchao(x, "grouped_mm")
        x = _wrap(qdata, scale, orig_dtype, _block_of(block_size, ""), None)
    if is_transposed(x):
        raise ValueError(
            f"grouped_mm: x must be quantized along its columns, which are contracted, got a transposed MXTensor in blocks of "
            f"{x.block}; give x.t(), or quantize x.dequantize() along the other dim"
        )
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
