"""Implements torch's ops for MXTensor. Only ops that copy, move or view values are implemented; arithmetic raises an error."""

import itertools
from collections.abc import Callable

import torch

from moxie.mx_tensor import _DTYPES, _OP, _ROWS_COLS, MXTensor, transpose

_aten = torch.ops.aten


def _like(mx: MXTensor, qdata, scale) -> MXTensor:
    return MXTensor(qdata, scale, mx.dtype, mx.block, mx.kernel_preference)


def _on_bytes(scale, function):
    """Applies an op to the bytes of a scale: ATen and inductor have few ops for e8m0."""
    return function(scale.view(torch.uint8)).view(torch.float8_e8m0fnu)


def _alias(func, mx):
    return _like(mx, func(mx.qdata), func(mx.scale))


def _clone(func, mx, *, memory_format=None):
    return _like(mx, mx.qdata.clone(), _on_bytes(mx.scale, torch.clone))


def _to_copy(func, mx, *, dtype=None, layout=None, device=None, pin_memory=None, non_blocking=False, memory_format=None):
    if dtype is not None and dtype != mx.dtype:
        plain = f"dequantize({dtype})" if dtype in _DTYPES else f"dequantize().to({dtype})"
        raise NotImplementedError(f"{_OP}: to({dtype}) would not be quantized; {plain} gives a plain tensor")
    move = lambda tensor: tensor.to(device=device, non_blocking=non_blocking, copy=True)
    return _like(mx, move(mx.qdata), _on_bytes(mx.scale, move))


def _view(func, mx, size):
    qdata = mx.qdata.view(size)
    rows = _ROWS_COLS[mx.block][0]
    keeps = qdata.dim() >= 1 + (rows != 1) and qdata.shape[-1] == mx.shape[-1] and (rows == 1 or qdata.shape[-2] == mx.shape[-2])
    if not keeps:
        raise ValueError(
            f"MXTensor: view must keep the columns{'' if rows == 1 else ' and rows'} of {tuple(mx.shape)}, which "
            f"blocks of {mx.block} scale together, got {tuple(qdata.shape)}"
        )
    above = qdata.shape[:-1] if rows == 1 else (*qdata.shape[:-2], mx.scale.shape[-2])
    return _like(mx, qdata, mx.scale.view(*above, mx.scale.shape[-1]))


def _slice(func, mx, dim=0, start=None, end=None, step=1):
    dim = dim % mx.dim()
    size = mx.shape[dim]
    start = 0 if start is None else max(start + size, 0) if start < 0 else min(start, size)
    end = size if end is None else max(end + size, 0) if end < 0 else min(end, size)
    block = _ROWS_COLS[mx.block][dim - (mx.dim() - 2)] if dim >= mx.dim() - 2 else 1
    whole = step == 1 or block == 1
    if not whole or start % block != 0 or (end % block != 0 and end != size):
        raise ValueError(
            f"MXTensor: a slice of dim {dim} must start and end at multiples of {block}, the block there, got "
            f"{start}:{end}:{step}"
        )
    qdata = func(mx.qdata, dim, start, end, step)
    return _like(mx, qdata, func(mx.scale, dim, start // block, -(-end // block), step))


def _split(func, mx, sizes, dim=0):
    size = mx.shape[dim]
    ends = [*range(0, size, sizes), size] if isinstance(sizes, int) else [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return [_slice(_aten.slice.Tensor, mx, dim, begin, end) for begin, end in itertools.pairwise(ends)]


def _on_leading(func, mx, dim, *args):
    """Applies an op to a dim that no block extends over: a batch dim, or the rows if blocks are one row tall."""
    inserts = func is _aten.unsqueeze.default
    leading = mx.dim() - (1 if _ROWS_COLS[mx.block][0] == 1 else 2) + inserts
    dim = dim + mx.dim() + inserts if dim < 0 else dim
    if dim >= leading:
        raise NotImplementedError(
            f"{_OP}: {func} is defined on the dims before those that blocks of {mx.block} extend over, got {dim} of "
            f"{tuple(mx.shape)}; call dequantize() first"
        )
    return _like(mx, func(mx.qdata, dim, *args), func(mx.scale, dim, *args))


def _t(func, mx):
    return transpose(mx)


def _pin_memory(func, mx, device=None):
    return _like(mx, mx.qdata.pin_memory(), _on_bytes(mx.scale, torch.Tensor.pin_memory))


def _copy_(func, to, source, non_blocking=False):
    if not isinstance(to, MXTensor):
        raise NotImplementedError(f"{_OP}: copy_ into a plain tensor is not defined; copy mx.dequantize()")
    if not isinstance(source, MXTensor):
        raise NotImplementedError(
            f"{_OP}: copy_ takes an MXTensor; quantize what is copied: MXTensor.to_mx(x, block={to.block!r})"
        )
    kinds = [(tuple(mx.shape), mx.dtype, mx.block) for mx in (to, source)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"{_OP}: copy_ keeps shape, dtype and block, {kinds[0]}, got {kinds[1]}; quantize what is copied alike")
    to.qdata.copy_(source.qdata, non_blocking)
    to.scale.view(torch.uint8).copy_(source.scale.view(torch.uint8), non_blocking)
    return to


def _grouped_mm(func, x, *args, **kwargs):
    """Implements grouped_mm below autograd. The op takes the values from qdata and scale, and only the dtype and shape from x."""
    return func(x.qdata.new_empty((1, 1), dtype=x.dtype).expand(x.shape), *args, **kwargs)


def _unchanged(func, mx, *args, **kwargs):
    return func(mx.qdata, *args, **kwargs)


IMPLEMENTATIONS: dict[Callable, Callable] = {
    _aten.detach.default: _alias,
    _aten.alias.default: _alias,
    _aten.clone.default: _clone,
    _aten._to_copy.default: _to_copy,
    _aten.view.default: _view,
    _aten._unsafe_view.default: _view,
    _aten.slice.Tensor: _slice,
    _aten.select.int: _on_leading,
    _aten.unsqueeze.default: _on_leading,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split,
    _aten.is_pinned.default: _unchanged,
    _aten.t.default: _t,
    _aten._pin_memory.default: _pin_memory,
    _aten.copy_.default: _copy_,
    torch.ops.moxie.grouped_mm.mx: _grouped_mm,
}
