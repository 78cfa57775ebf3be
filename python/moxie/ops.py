"""Typed functions over torch.ops.moxie.

x is either tokens [R, C], whose R rows may be divided into G groups of any sizes, or weights [G, N, K].

- `offs`, int32 [G], holds the exclusive end of each group: group g is rows offs[g-1] to offs[g]. Rows past the last end
  belong to no group; results there are zero.
- `block` is the rows x cols of x that share a scale: 1x32, 32x1, 32x32, 1x128, 128x1, 128x32 or 128x128. Blocks at an edge
  may be partial, and never extend into another group.
- `rule` says how the scale follows from the largest magnitude of a block: rceil, floor, ceil or even.
- `scale_layout` is plain (row-major), swizzled (the order that block-scaled tensor cores read) or quads (the order that the
  Hopper GEMM reads; for blocks of 128 along the contraction). Name the layout wherever scales are read: shapes
  do not always tell it (without offs, plain and swizzled scales of 1x32 and 32x1 can have the same shape).
- Rowwise results keep the order of x. Colwise results, with `_t` in their names, are stored transposed: [G, K, N] for weights,
  [C, R'] for tokens, where R' has room for every group rounded up to a multiple of the block.
- `out` holds tensors to write to, with exactly the shapes and dtypes of the results. Its scales may be uint8, which
  torch.compile needs if the graph writes a scale into a buffer.

qdata is torch.float8_e4m3fn and scale torch.float8_e8m0fnu. Arguments may be strided; results are contiguous. Only `pad_groups`
and `unpad_groups` are differentiable.
"""

from typing import Literal

import torch
from torch import Tensor

Block = Literal["1x32", "32x1", "32x32", "1x128", "128x1", "128x32", "128x128"]
Rule = Literal["rceil", "floor", "ceil", "even"]
ScaleLayout = Literal["plain", "swizzled", "quads"]
Activation = Literal["swiglu", "clamped_swiglu"]  # moe.swiglu defines both
Form = Literal["rowwise", "colwise"]

_ops = torch.ops.moxie


def _check_dtype_of_out(op: str, dtype: torch.dtype | None, out: Tensor) -> None:
    if dtype is not None and dtype != out.dtype:
        raise ValueError(f"{op}: dtype must be that of out, {out.dtype}, got {dtype}")


def _unpack_out(op: str, out: tuple[Tensor, ...], names: str) -> tuple[Tensor, ...]:
    if not isinstance(out, (tuple, list)) or len(out) != len(names.split()):
        got = len(out) if isinstance(out, (tuple, list)) else type(out).__name__
        raise ValueError(f"{op}: out must be the tensors ({', '.join(names.split())}), got {got}")
    return tuple(out)


def _run(name: str, out: tuple[Tensor, ...] | None, results: str, *args, **kwargs):
    """Calls the op, or its `out` overload if `out` is given. `results` holds the overload's argument names for the outputs."""
    op = getattr(_ops, name)
    if out is None:
        return op(*args, **kwargs)
    op.out(*args, **kwargs, **dict(zip(results.split(), _unpack_out(name, out, results))))
    return out


def has_cuda() -> bool:
    """Whether the library was built with its CUDA kernels.

    >>> moxie.has_cuda() in (True, False)
    True
    """
    return _ops._has_cuda()


def quantize_rowwise(
    x: Tensor,
    *,
    offs: Tensor | None = None,
    block: Block = "1x32",
    rule: Rule = "rceil",
    scale_layout: ScaleLayout = "plain",
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantizes x for a product that contracts its columns.

    Returns qdata, shaped as x, and scale: [R, C / 32] for the block 1x32, [G, N, K / 32] for weights.

    >>> x = torch.randn(64, 96, dtype=torch.bfloat16)
    >>> qdata, scale = moxie.quantize_rowwise(x)
    >>> qdata.dtype, scale.dtype, scale.shape
    (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.Size([64, 3]))
    """
    return _run("quantize_rowwise", out, "qdata scale", x, offs=offs, block=block, rule=rule, scale_layout=scale_layout)


def quantize_colwise(
    x: Tensor,
    *,
    offs: Tensor | None = None,
    block: Block = "32x1",
    rule: Rule = "rceil",
    scale_layout: ScaleLayout = "plain",
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantizes x for a product that contracts its rows, and stores it transposed.

    Returns qdata_t, [C, R'] or [G, K, N], and scale_t. Each group is padded with zeros to a multiple of the block, inside
    a buffer whose size depends on R and G alone.

    >>> x = torch.randn(64, 96)
    >>> offs = torch.tensor([10, 64], dtype=torch.int32)
    >>> qdata_t, scale_t = moxie.quantize_colwise(x, offs=offs)
    >>> qdata_t.shape, scale_t.shape  # 10 rows padded to 32, 54 to 64; R' is a multiple of 256
    (torch.Size([96, 256]), torch.Size([96, 8]))
    """
    return _run("quantize_colwise", out, "qdata_t scale_t", x, offs=offs, block=block, rule=rule, scale_layout=scale_layout)


def quantize_both(
    x: Tensor,
    *,
    offs: Tensor | None = None,
    rowwise_block: Block = "1x32",
    colwise_block: Block = "32x1",
    rule: Rule = "rceil",
    scale_layout: ScaleLayout = "plain",
    out: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantizes x rowwise and colwise, reading it once: returns qdata, scale, qdata_t, scale_t.

    >>> w = torch.randn(4, 64, 96)
    >>> qdata, scale, qdata_t, scale_t = moxie.quantize_both(w, rowwise_block="32x32", colwise_block="32x32")
    >>> torch.equal(qdata.view(torch.uint8).mT, qdata_t.view(torch.uint8))  # a square block scales both alike
    True
    """
    return _run(
        "quantize_both",
        out,
        "qdata scale qdata_t scale_t",
        x,
        offs=offs,
        rowwise_block=rowwise_block,
        colwise_block=colwise_block,
        rule=rule,
        scale_layout=scale_layout,
    )


def dequantize_rowwise(
    qdata: Tensor,
    scale: Tensor,
    *,
    offs: Tensor | None = None,
    block: Block = "1x32",
    dtype: torch.dtype | None = None,
    scale_layout: ScaleLayout = "plain",
    out: Tensor | None = None,
) -> Tensor:
    """The inverse of quantize_rowwise, in bf16 (if no dtype is given) or f32.

    scale_layout is the layout of `scale`, as it was given to quantize_rowwise.

    >>> x = torch.tensor([[1.0, -2.0, 3.5, 0.0]])
    >>> moxie.dequantize_rowwise(*moxie.quantize_rowwise(x), dtype=torch.float32)
    tensor([[ 1.0000, -2.0000,  3.5000,  0.0000]])
    """
    if out is None:
        return _ops.dequantize_rowwise(qdata, scale, offs=offs, block=block, dtype=dtype, scale_layout=scale_layout)
    _check_dtype_of_out("dequantize_rowwise", dtype, out)
    _ops.dequantize_rowwise.out(qdata, scale, offs=offs, block=block, scale_layout=scale_layout, x=out)
    return out


def dequantize_colwise(
    qdata_t: Tensor,
    scale_t: Tensor,
    num_rows: int,
    *,
    offs: Tensor | None = None,
    block: Block = "32x1",
    dtype: torch.dtype | None = None,
    scale_layout: ScaleLayout = "plain",
    out: Tensor | None = None,
) -> Tensor:
    """The inverse of quantize_colwise: x, no longer transposed.

    num_rows is R, or N of weights: qdata_t is padded, so its shape does not say it. scale_layout is the layout of `scale_t`.

    >>> x = torch.tensor([[1.0, -2.0], [3.5, 0.0], [7.0, 2.0]])
    >>> moxie.dequantize_colwise(*moxie.quantize_colwise(x), 3, dtype=torch.float32)
    tensor([[ 1.0000, -2.0000],
            [ 3.5000,  0.0000],
            [ 7.0000,  2.0000]])
    """
    if out is None:
        return _ops.dequantize_colwise(qdata_t, scale_t, num_rows, offs=offs, block=block, dtype=dtype, scale_layout=scale_layout)
    _check_dtype_of_out("dequantize_colwise", dtype, out)
    _ops.dequantize_colwise.out(qdata_t, scale_t, num_rows, offs=offs, block=block, scale_layout=scale_layout, x=out)
    return out


def requantize(
    qdata: Tensor,
    scale: Tensor,
    *,
    offs: Tensor | None = None,
    block: Block = "1x32",
    colwise_block: Block = "32x1",
    rule: Rule = "rceil",
    scale_layout: ScaleLayout = "plain",
    from_layout: ScaleLayout = "plain",
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Makes the colwise form from the rowwise form, without a bf16 or f32 tensor between them.

    The result is bit-equal to dequantizing to f32 and quantizing again. block and from_layout describe `scale`; colwise_block
    and scale_layout describe the result.

    >>> qdata, scale = moxie.quantize_rowwise(torch.randn(64, 96))
    >>> qdata_t, scale_t = moxie.requantize(qdata, scale)
    >>> x = moxie.dequantize_rowwise(qdata, scale, dtype=torch.float32)
    >>> torch.equal(qdata_t.view(torch.uint8), moxie.quantize_colwise(x)[0].view(torch.uint8))
    True
    """
    return _run(
        "requantize",
        out,
        "qdata_t scale_t",
        qdata,
        scale,
        offs=offs,
        block=block,
        colwise_block=colwise_block,
        rule=rule,
        scale_layout=scale_layout,
        from_layout=from_layout,
    )


def quantize_per_row(
    x: Tensor,
    *,
    offs: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantizes to FP8 with one power-of-two f32 scale per row: returns qdata, shaped as x, and scale, [R] or [G, N].

    >>> x = torch.randn(64, 96)
    >>> qdata, scale = moxie.quantize_per_row(x)
    >>> bool(((qdata.float() * scale[:, None] - x).abs() <= 2**-4 * x.abs() + scale[:, None] * 2**-10).all())
    True
    """
    return _run("quantize_per_row", out, "qdata scale", x, offs=offs)


def quantize_per_col(
    x: Tensor,
    *,
    offs: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantizes to FP8 with one power-of-two f32 scale per column of each group, and stores the result transposed.

    Returns qdata_t [C, R'], groups padded to 16 rows, and scale_t [G, C]; or [G, K, N] and [G, K].

    >>> x = torch.randn(64, 96)
    >>> qdata_t, scale_t = moxie.quantize_per_col(x, offs=torch.tensor([16, 64], dtype=torch.int32))
    >>> qdata_t.shape, scale_t.shape
    (torch.Size([96, 80]), torch.Size([2, 96]))
    """
    return _run("quantize_per_col", out, "qdata_t scale_t", x, offs=offs)


def swizzle_scale(scale: Tensor, *, offs: Tensor | None = None, form: Form = "rowwise") -> Tensor:
    """Rearranges plain scales, one per 1 x 32 elements, into the order that block-scaled tensor cores read (32x4x4 tiles).

    A stack [G, rows, cols] gives [G, flat]. With offs each group starts a new tile; offs counts the rows of a rowwise operand,
    or the scale columns of a colwise operand.

    >>> _, scale = moxie.quantize_rowwise(torch.randn(100, 96))
    >>> moxie.swizzle_scale(scale).shape
    torch.Size([128, 4])
    """
    return _ops.swizzle_scale(scale, offs=offs, form=form)


def unswizzle_scale(
    swizzled: Tensor,
    rows: int,
    cols: int,
    *,
    offs: Tensor | None = None,
    form: Form = "rowwise",
) -> Tensor:
    """The inverse of swizzle_scale: [rows, cols], or [G, rows, cols] where swizzled is a stack [G, flat].

    >>> _, scale = moxie.quantize_rowwise(torch.randn(100, 96))
    >>> again = moxie.unswizzle_scale(moxie.swizzle_scale(scale), 100, 3)
    >>> torch.equal(again.view(torch.uint8), scale.view(torch.uint8))
    True
    """
    return _ops.unswizzle_scale(swizzled, rows, cols, offs=offs, form=form)


def replicate_scale(scale: Tensor, outer: int, k: int, *, block: Block, form: Form = "rowwise") -> Tensor:
    """Repeats each scale of a larger block, so that every 1 x 32 elements of the operand [outer, k] have a scale of their own.

    >>> _, scale = moxie.quantize_rowwise(torch.randn(4, 256, 512), block="128x128")
    >>> scale.shape, moxie.replicate_scale(scale, 256, 512, block="128x128").shape
    (torch.Size([4, 2, 4]), torch.Size([4, 256, 16]))
    """
    return _ops.replicate_scale(scale, outer, k, block=block, form=form)


def compact_scale(scale: Tensor, *, block: Block, form: Form = "rowwise") -> Tensor:
    """The inverse of replicate_scale. On a CPU, scales that differ inside a block are refused.

    >>> _, scale = moxie.quantize_rowwise(torch.randn(4, 256, 512), block="128x128")
    >>> repeated = moxie.replicate_scale(scale, 256, 512, block="128x128")
    >>> torch.equal(moxie.compact_scale(repeated, block="128x128").view(torch.uint8), scale.view(torch.uint8))
    True
    """
    return _ops.compact_scale(scale, block=block, form=form)


def pad_groups(
    x: Tensor,
    offs: Tensor,
    alignment: int = 32,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pads each group of rows with zeros to a multiple of alignment: padded, starts, ends.

    x may have any dtype. The size of padded depends on R and G only, so nothing waits for offs. starts and ends are int32 [G]:
    group g is rows starts[g] to ends[g] of padded. An empty group stays empty.

    >>> padded, starts, ends = moxie.pad_groups(torch.ones(5, 2), torch.tensor([2, 5], dtype=torch.int32), 4)
    >>> starts.tolist(), ends.tolist(), padded[:8, 0].tolist()
    ([0, 4], [4, 8], [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0])
    """
    return _run("pad_groups", out, "padded starts ends", x, offs, alignment)


def unpad_groups(
    padded: Tensor,
    offs: Tensor,
    starts: Tensor,
    num_rows: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The inverse of pad_groups: x [num_rows, C]. Rows that no group covers are zero.

    >>> x, offs = torch.randn(5, 2), torch.tensor([2, 5], dtype=torch.int32)
    >>> padded, starts, ends = moxie.pad_groups(x, offs)
    >>> torch.equal(moxie.unpad_groups(padded, offs, starts, 5), x)
    True
    """
    if out is None:
        return _ops.unpad_groups(padded, offs, starts, num_rows)
    _ops.unpad_groups.out(padded, offs, starts, num_rows, x=out)
    return out


def padded_offs(offs: Tensor, alignment: int = 32) -> Tensor:
    """The exclusive ends of the groups once each is padded to a multiple of alignment.

    >>> moxie.padded_offs(torch.tensor([2, 2, 40], dtype=torch.int32)).tolist()
    [32, 32, 96]
    """
    return _ops.padded_offs(offs, alignment)
