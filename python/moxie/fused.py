"""SwiGLU and permute fused with the quantization of their results. The bytes equal those of two separate calls, but the tensor
between them is never written to memory.

Blocks, rules and layouts are those of `quantize_rowwise` and `quantize_both` (ops.py). `expert_mlp` uses these ops itself. They
are not differentiable.
"""

import torch
from torch import Tensor

from moxie.ops import Activation, Block, Rule, ScaleLayout

_ops = torch.ops.moxie


def swiglu_quantize_rowwise(
    h: Tensor,
    *,
    offs: Tensor | None = None,
    block: Block = "1x32",
    rule: Rule = "rceil",
    scale_layout: ScaleLayout = "plain",
    activation: Activation = "swiglu",
) -> tuple[Tensor, Tensor]:
    """quantize_rowwise(swiglu(h)): h [R, 2F] -> qdata [R, F], scale.

    >>> h = torch.randn(4, 128)
    >>> qdata, scale = moxie.swiglu_quantize_rowwise(h)
    >>> torch.equal(qdata.float(), moxie.quantize_rowwise(moxie.swiglu(h))[0].float())
    True
    """
    return _ops.swiglu_quantize_rowwise(h, offs=offs, block=block, rule=rule, scale_layout=scale_layout, activation=activation)


def swiglu_quantize_both(
    h: Tensor,
    *,
    offs: Tensor | None = None,
    rowwise_block: Block = "1x32",
    colwise_block: Block = "32x1",
    rule: Rule = "rceil",
    scale_layout: ScaleLayout = "plain",
    activation: Activation = "swiglu",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """quantize_both(swiglu(h)): h [R, 2F] -> qdata [R, F], scale, qdata_t [F, R'], scale_t.

    >>> qdata, scale, qdata_t, scale_t = moxie.swiglu_quantize_both(torch.randn(64, 128))
    >>> qdata.shape, qdata_t.shape
    (torch.Size([64, 64]), torch.Size([64, 64]))
    """
    return _ops.swiglu_quantize_both(
        h,
        offs=offs,
        rowwise_block=rowwise_block,
        colwise_block=colwise_block,
        rule=rule,
        scale_layout=scale_layout,
        activation=activation,
    )


def swiglu_backward_quantize_both(
    da: Tensor,
    h: Tensor,
    *,
    offs: Tensor | None = None,
    rowwise_block: Block = "1x32",
    colwise_block: Block = "32x1",
    rule: Rule = "rceil",
    scale_layout: ScaleLayout = "plain",
    activation: Activation = "swiglu",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """quantize_both(swiglu_backward(da, h)): da [R, F], h [R, 2F] -> qdata [R, 2F], scale, qdata_t [2F, R'], scale_t.

    >>> qdata, scale, qdata_t, scale_t = moxie.swiglu_backward_quantize_both(torch.randn(64, 32), torch.randn(64, 64))
    >>> qdata.shape, scale_t.shape
    (torch.Size([64, 64]), torch.Size([64, 2]))
    """
    return _ops.swiglu_backward_quantize_both(
        da,
        h,
        offs=offs,
        rowwise_block=rowwise_block,
        colwise_block=colwise_block,
        rule=rule,
        scale_layout=scale_layout,
        activation=activation,
    )


def permute_quantize_rowwise(
    x: Tensor,
    slot_of: Tensor,
    top_k: int,
    *,
    offs: Tensor | None = None,
    block: Block = "1x32",
    rule: Rule = "rceil",
    scale_layout: ScaleLayout = "plain",
) -> tuple[Tensor, Tensor]:
    """quantize_rowwise of permute's rows: x [T, D] -> qdata [T * top_k, D], scale.

    >>> offs, slot_of, row_of = moxie.route(torch.tensor([[0, 1], [1, 0]], dtype=torch.int32), 2)
    >>> moxie.permute_quantize_rowwise(torch.randn(2, 32), slot_of, 2, offs=offs)[0].shape
    torch.Size([4, 32])
    """
    return _ops.permute_quantize_rowwise(x, slot_of, top_k, offs=offs, block=block, rule=rule, scale_layout=scale_layout)


def permute_quantize_both(
    x: Tensor,
    slot_of: Tensor,
    top_k: int,
    *,
    offs: Tensor | None = None,
    rowwise_block: Block = "1x32",
    colwise_block: Block = "32x1",
    rule: Rule = "rceil",
    scale_layout: ScaleLayout = "plain",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """quantize_both of permute's rows: x [T, D] -> qdata [T * top_k, D], scale, qdata_t [D, R'], scale_t.

    >>> offs, slot_of, row_of = moxie.route(torch.tensor([[0, 1], [1, 0]], dtype=torch.int32), 2)
    >>> x = torch.randn(2, 32)
    >>> qdata_t = moxie.permute_quantize_both(x, slot_of, 2, offs=offs)[2]
    >>> rows = moxie.permute(x, slot_of, row_of, 2)
    >>> torch.equal(qdata_t.float(), moxie.quantize_colwise(rows, offs=offs)[0].float())
    True
    """
    return _ops.permute_quantize_both(
        x,
        slot_of,
        top_k,
        offs=offs,
        rowwise_block=rowwise_block,
        colwise_block=colwise_block,
        rule=rule,
        scale_layout=scale_layout,
    )
