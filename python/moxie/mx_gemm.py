"""grouped_mm with an MXTensor as x: the product takes it as it is, and wgrad makes its other form from it.

y is that of quantizing the same values in the call. The gradient goes to the MXTensor in its original dtype, and from there to
what it was quantized from.
"""

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor
from torch._dynamo import allow_in_graph
from torch.utils._python_dispatch import _disable_current_modes

from moxie.mx_tensor import MXTensor
from moxie.ops import (
    dequantize_rowwise, quantize_both, quantize_colwise, quantize_rowwise, replicate_scale, requantize, swizzle_scale,
)
from moxie.recipe import Recipe

_ops = torch.ops.moxie
_OP = "grouped_mm"


def _check(x: MXTensor, recipe: Recipe) -> None:
    if x.dim() != 2:
        raise ValueError(f"{_OP}: x must be [rows, k], got {x.dim()} dims")
    if recipe.scaling != "block":
        raise ValueError(f"{_OP}: x is an MXTensor in blocks of {x.block}, and this recipe has none; x.dequantize() is a plain "
                         "tensor, and the recipes mxfp8_* have blocks")
    if x.block != recipe.activations and (x.block, recipe.activations) != ("1x128", "1x32"):
        raise ValueError(f"{_OP}: x is an MXTensor in blocks of {x.block}, and the recipe takes activations in blocks of "
                         f"{recipe.activations}; quantize it so, or take a recipe with activations={x.block}")


def _operand_scale(x: MXTensor, recipe: Recipe, offs: Optional[Tensor], layout: str) -> Tensor:
    """The scales as forward's product reads them."""
    scale = x.scale
    if x.block != recipe.activations or (layout == "swizzled" and x.block != "1x32"):
        scale = replicate_scale(scale, x.shape[0], x.shape[1], block=x.block)  # blocks of 128 are four of 32 with one scale
    return swizzle_scale(scale, offs=offs) if layout == "swizzled" else scale


def _layout(text: str, w: Tensor) -> str:
    with _disable_current_modes():  # which trace tensors, and take no op that returns words
        path, _ = _ops._path(text, w.device, w.shape[1], w.shape[2])
    return "swizzled" if path == "sm100" else "plain"


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, offs, bias, text, dtype, quantized_w, main_grad):
        recipe = Recipe.from_name(text)
        layout = _layout(text, w)
        qdata, scale, qdata_t, scale_t = quantized_w or _ops.quantize_weights(w, recipe=text)
        if dtype is None:
            dtype = x.dtype if recipe.out == "input" else getattr(torch, recipe.out)
        y = _ops.grouped_mm.quantized(
            x.qdata, _operand_scale(x, recipe, offs, layout), qdata, scale, offs, recipe=text, bias=bias, dtype=dtype)
        ctx.save_for_backward(x.qdata, x.scale, qdata_t, scale_t, offs, main_grad)
        ctx.recipe, ctx.layout, ctx.block, ctx.x_dtype, ctx.w_dtype = recipe, layout, x.block, x.dtype, w.dtype
        ctx.bias = None if bias is None else (bias.dim(), bias.dtype)
        return y

    @staticmethod
    def backward(ctx, dy):
        qdata, scale, w_t, w_scale_t, offs, main_grad = ctx.saved_tensors
        recipe, text = ctx.recipe, str(ctx.recipe)
        needs_dx, needs_dw, _, needs_dbias, *_ = ctx.needs_input_grad
        dx = dw = dbias = None
        dy_row, dy_col = _dy_operands(ctx, dy, offs, needs_dx, needs_dw)
        if needs_dx:
            dx = _ops.grouped_dgrad(*dy_row, w_t, w_scale_t, offs, recipe=text, dtype=ctx.x_dtype)
        if needs_dw:
            if recipe.wgrad_with_hp:
                x = (dequantize_rowwise(qdata, scale, block=ctx.block), None)
            else:
                x = requantize(qdata, scale, offs=offs, block=ctx.block, colwise_block=recipe.wgrad_x, rule=recipe.rule,
                               scale_layout=ctx.layout)
            dw = _wgrad(dy_col, x, len(dy), offs, text, ctx.w_dtype, main_grad)
        if ctx.bias is not None and needs_dbias:
            sums = _ops.sum_groups(dy, offs)
            dbias = (sums.sum(0) if ctx.bias[0] == 1 else sums).to(ctx.bias[1])
        return dx, dw, None, dbias, None, None, None, None


def _dy_operands(ctx, dy: Tensor, offs: Optional[Tensor], needs_dx: bool, needs_dw: bool):
    """The forms of dy that dgrad and wgrad contract; both from one read."""
    recipe = ctx.recipe
    common = dict(offs=offs, rule=recipe.rule, scale_layout=ctx.layout)
    hp = (dy.to(torch.bfloat16), None)
    if needs_dx and needs_dw and not recipe.wgrad_with_hp:
        *row, qdata_t, scale_t = quantize_both(dy, rowwise_block=recipe.activations, colwise_block=recipe.wgrad_dy, **common)
        return row, (qdata_t, scale_t)
    row = quantize_rowwise(dy, block=recipe.activations, **common) if needs_dx else None
    if not needs_dw:
        return row, None
    return row, hp if recipe.wgrad_with_hp else quantize_colwise(dy, block=recipe.wgrad_dy, **common)


def _wgrad(dy, x, rows: int, offs, text: str, dtype: torch.dtype, main_grad: Optional[Tensor]) -> Optional[Tensor]:
    if main_grad is None:
        return _ops.grouped_wgrad(*dy, *x, rows, offs, recipe=text, dtype=dtype)
    if type(main_grad) is Tensor:
        _ops.grouped_wgrad_add_(main_grad, *dy, *x, rows, offs, recipe=text)
    else:  # in a graph the sum is a step of its own: inductor takes no op that writes one argument while another is e8m0
        main_grad.add_(_ops.grouped_wgrad(*dy, *x, rows, offs, recipe=text, dtype=main_grad.dtype))
    return None


@allow_in_graph
def grouped_mm(
    x: MXTensor, w: Tensor, offs: Optional[Tensor], text: str, bias: Optional[Tensor], dtype: Optional[torch.dtype],
    quantized_w: Optional[Sequence[Tensor]], main_grad: Optional[Tensor],
) -> Tensor:
    _check(x, Recipe.from_name(text))
    text = str(Recipe.from_name(text))
    return _GroupedMM.apply(x, w, offs, bias, text, dtype, quantized_w, main_grad)
