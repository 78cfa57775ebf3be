"""The differentiable grouped products, and WeightCache, which holds their weights quantized.

x is [R, K], the rows of G groups; w is [G, N, K], one matrix per group. `offs`, int32 [G], holds the exclusive end of each group
of rows. It stays on x's device, and nothing here waits for it. Groups may have any size. Rows past offs[-1] are in no group:
their results and gradients are zero. dw of a group without rows is zero too.
"""

import sys
import warnings
from collections.abc import Sequence
from typing import Any, Literal, Union

import torch
from torch import Tensor

from moxie.dtensors import any_dtensor
from moxie.main_grad import check_main_grad
from moxie.ops import Activation, ScaleLayout
from moxie.recipe import DEFAULT_RECIPE, AnyRecipe

_ops = torch.ops.moxie

QuantizedWeights = Union["WeightCache", Sequence[Tensor]]
W13Layout = Literal["concatenated", "interleaved"]  # all gate rows before all up rows, or gate and up rows alternating

# The tensor classes whose values are already quantized. moxie.mx_tensor adds its class when it is imported; importing it here
# would take seconds.
MX_TYPES: tuple[type, ...] = ()


def grouped_mm(
    x: Tensor,
    w: Tensor,
    offs: Tensor | None = None,
    *,
    recipe: AnyRecipe = DEFAULT_RECIPE,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    quantized_w: QuantizedWeights | None = None,
    main_grad: Tensor | None = None,
) -> Tensor:
    """y = x w^T, group by group: [R, N]. Differentiable in x, w and bias; only the gradients that are needed are computed.

    `bias` is [N], or [G, N] for one per group. `dtype`, the dtype of y, is bf16 or f32; by default it is that of x, unless the
    recipe sets `out`. A gradient has the dtype of its tensor. `quantized_w` is a `WeightCache` of w, used instead of quantizing w
    again. If `main_grad`, f32 [G, N, K], is given, backward adds dw to it and leaves w.grad alone. x may be a `moxie.MXTensor`
    whose blocks are those of the recipe's activations.

    >>> x = torch.randn(10, 64, requires_grad=True)
    >>> w = torch.randn(3, 32, 64, requires_grad=True)
    >>> offs = torch.tensor([4, 4, 9], dtype=torch.int32)
    >>> y = moxie.grouped_mm(x, w, offs)
    >>> y.sum().backward()
    >>> y.shape, w.grad[1].abs().max().item(), x.grad[9].abs().max().item()  # group 1 is empty; row 9 is in no group
    (torch.Size([10, 32]), 0.0, 0.0)
    """
    if any_dtensor(x, w, bias):
        from moxie.distributed import products

        return products.grouped_mm(
            x, w, offs, recipe=str(recipe), bias=bias, dtype=dtype, quantized_w=quantized_w, main_grad=main_grad
        )
    quantized = _tensors("grouped_mm", quantized_w, recipe)
    check_main_grad("grouped_mm", "main_grad", main_grad, w)
    if isinstance(x, (tuple, list)):
        raise TypeError(
            "grouped_mm: x must be a tensor; what is quantized already is given as "
            "moxie.MXTensor.from_qdata_and_scales(qdata, scale, orig_dtype)"
        )
    if isinstance(x, MX_TYPES) or type(x).__name__ == "MXTensor":  # the name test finds torchao's class without importing torchao
        from moxie import mx_tensor

        return mx_tensor.multiply(x, w, offs, str(recipe), bias, dtype, quantized, main_grad)
    return _ops.grouped_mm(x, w, offs, recipe=str(recipe), bias=bias, dtype=dtype, quantized_w=quantized, main_grad=main_grad)


def expert_mlp(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    offs: Tensor | None = None,
    *,
    recipe: AnyRecipe = DEFAULT_RECIPE,
    quantized_w13: QuantizedWeights | None = None,
    quantized_w2: QuantizedWeights | None = None,
    main_grad13: Tensor | None = None,
    main_grad2: Tensor | None = None,
    slot_of: Tensor | None = None,
    row_of: Tensor | None = None,
    top_k: int = 1,
    weights: Tensor | None = None,
    keep: Literal["h", "h_fp8"] = "h",
    x_dtype: torch.dtype | None = None,
    activation: Activation = "swiglu",
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    w13_layout: W13Layout = "concatenated",
) -> Tensor:
    """The MLP of each expert as one autograd node: grouped_mm with w13, swiglu, grouped_mm with w2.

    w13 is [G, 2F, D], the gate rows before the up rows; w2 is [G, D, F]. The result equals that of the three calls. If slot_of
    and row_of of `route` are given, x is tokens [T, D], and the MLP runs on the rows [T * top_k, D] that `permute` makes of them.
    Recipes with blocks quantize these rows while they read the tokens, so the permuted rows are never written to memory. If
    `weights`, f32 [T, top_k], is given as well, the result is that of `unpermute`: the weighted sum of each token's rows, [T, D];
    weights then get a gradient.

    For backward the node keeps h, the result of the product with w13, and little else. `keep="h_fp8"` keeps h in FP8: half the
    bytes, at some cost in the accuracy of the gradients (docs/MOE.md). `x_dtype` is set by autocast: x is rounded to this dtype,
    and the gradient of x is not rounded.

    `activation` is that of `swiglu`. b13 [G, 2F] and b2 [G, D] are added to the products, b2 before the multiplication by
    `weights`, and get gradients. Pass weights that are stored [in, out] as views, `w.mT`: nothing is copied, and the gradient
    has the layout of the parameter. `w13_layout="interleaved"` means that gate and up rows alternate in w13 and b13 (docs/MOE.md
    gives the cost); a weight cache of w13 must be made with the same layout.

    >>> x, offs = torch.randn(10, 64), torch.tensor([4, 9], dtype=torch.int32)
    >>> w13, w2 = torch.randn(2, 96, 64), torch.randn(2, 64, 48)
    >>> y = moxie.expert_mlp(x, w13, w2, offs)
    >>> h = moxie.grouped_mm(x, w13, offs)
    >>> torch.equal(y, moxie.grouped_mm(moxie.swiglu(h), w2, offs))
    True
    """
    if any_dtensor(x, w13, w2, weights, b13, b2):
        from moxie.distributed import products

        return products.expert_mlp(
            x,
            w13,
            w2,
            offs,
            recipe=str(recipe),
            slot_of=slot_of,
            row_of=row_of,
            top_k=top_k,
            weights=weights,
            unsupported={
                "quantized_w13": quantized_w13,
                "quantized_w2": quantized_w2,
                "main_grad13": main_grad13,
                "main_grad2": main_grad2,
                "b13": b13,
                "b2": b2,
                "w13_layout": None if w13_layout == "concatenated" else w13_layout,
            },
            keep=keep,
            x_dtype=x_dtype,
            activation=activation,
        )
    check_main_grad("expert_mlp", "main_grad13", main_grad13, w13)
    check_main_grad("expert_mlp", "main_grad2", main_grad2, w2)
    options = {
        "recipe": str(recipe),
        "quantized_w13": _tensors("expert_mlp", quantized_w13, recipe, w13_layout),
        "quantized_w2": _tensors("expert_mlp", quantized_w2, recipe),
        "main_grad13": main_grad13,
        "main_grad2": main_grad2,
        "slot_of": slot_of,
        "row_of": row_of,
        "top_k": top_k,
        "weights": weights,
        "keep": keep,
        "x_dtype": x_dtype,
        "activation": activation,
        "b13": b13,
        "b2": b2,
        "w13_layout": w13_layout,
    }
    return _ops.expert_mlp(x, w13, w2, offs, **not_default(options))


def _defaults_of(op: Any) -> dict[str, Any]:
    values = {argument.name: argument.default_value for argument in op._schema.arguments if argument.has_default_value()}
    return {name: sys.intern(value) if isinstance(value, str) else value for name, value in values.items()}


_DEFAULTS = _defaults_of(_ops.expert_mlp.default)


def not_default(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of expert_mlp that are not its defaults. torch's conversion of an argument by name, default or not,
    takes the host as long as a call of a Python function. Literals are interned, so identity finds defaults; another object
    of the same value is passed on."""
    return {name: value for name, value in options.items() if value is not _DEFAULTS[name]}


def quantize_weights(
    w: Tensor,
    *,
    recipe: AnyRecipe = DEFAULT_RECIPE,
    out: Sequence[Tensor] | None = None,
) -> Sequence[Tensor]:
    """Quantizes w rowwise and colwise, in the recipe's blocks and the device's scale layout: qdata, scale, qdata_t, scale_t.

    >>> qdata, scale, qdata_t, scale_t = moxie.quantize_weights(torch.randn(4, 256, 128))
    >>> qdata_t.shape, scale_t.shape
    (torch.Size([4, 128, 256]), torch.Size([4, 1, 2]))
    """
    if out is None:
        return _ops.quantize_weights(w, recipe=str(recipe))
    qdata, scale, qdata_t, scale_t = out
    _ops.quantize_weights.out(w, recipe=str(recipe), qdata=qdata, scale=scale, qdata_t=qdata_t, scale_t=scale_t)
    return out


# ---- the three passes, on quantized operands -----------------------------------------------------------------------------------
# These functions are not differentiable. An operand without a scale is bf16 or f32 and not transposed. `dtype` is that of the
# result, bf16 if None. `scale_layout` is the layout of the scales of x and dy; None means swizzled if a Blackwell kernel
# multiplies, else plain. The Hopper GEMM reads quads, and rearranges plain scales first. Operands that are decoded may have
# any layout.


def grouped_fwd(
    x: Tensor,
    x_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor | None,
    offs: Tensor | None = None,
    *,
    recipe: AnyRecipe,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    scale_layout: ScaleLayout | None = None,
) -> Tensor:
    """y [R, N] = x w^T, from the rowwise forms of both.

    >>> x, w = torch.randn(8, 32), torch.randn(1, 64, 32)
    >>> qdata, scale, _, _ = moxie.quantize_weights(w, recipe="mxfp8_rceil")
    >>> y = moxie.grouped_fwd(*moxie.quantize_rowwise(x), qdata, scale, recipe="mxfp8_rceil", dtype=torch.float32)
    >>> torch.equal(y, moxie.grouped_mm(x, w, recipe="mxfp8_rceil"))
    True
    """
    return _ops.grouped_fwd(x, x_scale, w, w_scale, offs, recipe=str(recipe), bias=bias, dtype=dtype, scale_layout=scale_layout)


def grouped_dgrad(
    dy: Tensor,
    dy_scale: Tensor | None,
    w_t: Tensor,
    w_scale_t: Tensor | None,
    offs: Tensor | None = None,
    *,
    recipe: AnyRecipe,
    dtype: torch.dtype | None = None,
    scale_layout: ScaleLayout | None = None,
) -> Tensor:
    """dx [R, K] = dy w, from the rowwise form of dy and the colwise form of w.

    >>> dy, w = torch.randn(8, 64), torch.randn(1, 64, 32)
    >>> _, _, w_t, w_scale_t = moxie.quantize_weights(w, recipe="mxfp8_rceil")
    >>> moxie.grouped_dgrad(*moxie.quantize_rowwise(dy), w_t, w_scale_t, recipe="mxfp8_rceil").shape
    torch.Size([8, 32])
    """
    return _ops.grouped_dgrad(dy, dy_scale, w_t, w_scale_t, offs, recipe=str(recipe), dtype=dtype, scale_layout=scale_layout)


def grouped_wgrad(
    dy_t: Tensor,
    dy_scale_t: Tensor | None,
    x_t: Tensor,
    x_scale_t: Tensor | None,
    num_rows: int,
    offs: Tensor | None = None,
    *,
    recipe: AnyRecipe,
    dtype: torch.dtype | None = None,
    scale_layout: ScaleLayout | None = None,
) -> Tensor:
    """dw [G, N, K] = dy^T x of each group, from the colwise forms of both. num_rows is R: the operands are padded, so their
    shapes do not tell it. The padding may hold any values.

    >>> dy, x = moxie.quantize_colwise(torch.randn(8, 64)), moxie.quantize_colwise(torch.randn(8, 32))
    >>> moxie.grouped_wgrad(*dy, *x, 8, recipe="mxfp8_rceil").shape
    torch.Size([1, 64, 32])
    """
    return _ops.grouped_wgrad(
        dy_t, dy_scale_t, x_t, x_scale_t, num_rows, offs, recipe=str(recipe), dtype=dtype, scale_layout=scale_layout
    )


def grouped_wgrad_add_(
    dw: Tensor,
    dy_t: Tensor,
    dy_scale_t: Tensor | None,
    x_t: Tensor,
    x_scale_t: Tensor | None,
    num_rows: int,
    offs: Tensor | None = None,
    *,
    recipe: AnyRecipe,
    scale_layout: ScaleLayout | None = None,
) -> None:
    """Adds the result of grouped_wgrad to dw, f32 [G, N, K].

    >>> dy, x = moxie.quantize_colwise(torch.randn(8, 64)), moxie.quantize_colwise(torch.randn(8, 32))
    >>> dw = torch.zeros(1, 64, 32)
    >>> moxie.grouped_wgrad_add_(dw, *dy, *x, 8, recipe="mxfp8_rceil")
    >>> torch.equal(dw, moxie.grouped_wgrad(*dy, *x, 8, recipe="mxfp8_rceil", dtype=torch.float32))
    True
    """
    _ops.grouped_wgrad_add_(dw, dy_t, dy_scale_t, x_t, x_scale_t, num_rows, offs, recipe=str(recipe), scale_layout=scale_layout)


def sum_groups(x: Tensor, offs: Tensor | None = None) -> Tensor:
    """Adds up the rows of each group in f32: [G, C]. This is the gradient of a bias.

    >>> moxie.sum_groups(torch.ones(5, 2), torch.tensor([2, 5], dtype=torch.int32)).tolist()
    [[2.0, 2.0], [3.0, 3.0]]
    """
    return _ops.sum_groups(x, offs)


class WeightCache(torch.nn.Module):
    """Holds the quantized form of w in buffers, so that w is quantized once per optimizer step instead of in every forward.

    The cache does not notice changes of w: torch's version counter misses those by torch.compile, fused optimizers, `.data`
    writes and CUDA graphs. Call `refresh_()` after every change of w, or let `refresh_after(optimizer)` do it. In eager mode a
    product warns if the version counter shows a change since the last refresh. The buffers are not part of a state dict.

    >>> w = torch.nn.Parameter(torch.randn(2, 64, 128))
    >>> cache = moxie.WeightCache(w)
    >>> optimizer = torch.optim.AdamW([w])
    >>> handle = cache.refresh_after(optimizer)
    >>> x, offs = torch.randn(7, 128), torch.tensor([3, 7], dtype=torch.int32)
    >>> moxie.grouped_mm(x, w, offs, quantized_w=cache).sum().backward()
    >>> optimizer.step()  # and the cache holds the new weights
    """

    qdata: Tensor
    scale: Tensor
    qdata_t: Tensor
    scale_t: Tensor

    w13_layout: W13Layout = "concatenated"  # a class attribute, because older pickles have no such field
    transposed: bool = False

    def __init__(
        self,
        w: Tensor,
        *,
        recipe: AnyRecipe = DEFAULT_RECIPE,
        w13_layout: W13Layout = "concatenated",
        transposed: bool = False,
    ):
        super().__init__()
        self.recipe = str(recipe)
        self.w13_layout, self.transposed = w13_layout, transposed
        # A list hides the parameter from nn.Module, which would otherwise register it as a parameter of the cache as well.
        self._weights = [w]
        self._fill(w)
        self._seen = _version_of(w)

    _NAMES = ("qdata", "scale", "qdata_t", "scale_t")

    def _as_taken(self, w: Tensor) -> Tensor:
        """Returns w in the shape that grouped_mm takes, [G, N, K]. ViewCache overrides this."""
        w = w.mT if self.transposed else w
        return concatenated(w) if self.w13_layout == "interleaved" else w

    def _fill(self, w: Tensor) -> None:
        for name, tensor in zip(self._NAMES, quantize_weights(self._as_taken(w.detach()), recipe=self.recipe)):
            # Scales are stored as bytes: inductor does not let an op write to e8m0 tensors.
            is_scale = tensor.dtype == torch.float8_e8m0fnu
            self.register_buffer(name, tensor.view(torch.uint8) if is_scale else tensor, persistent=False)

    @property
    def tensors(self) -> list[Tensor]:
        return [getattr(self, name) for name in self._NAMES]

    @property
    def nbytes(self) -> int:
        """The size of the cache in bytes: a little over two per element of w."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def _apply(self, fn, recurse=True):
        # The cache moves to another device with its module, but keeps its dtypes: model.bfloat16() must not convert FP8 data.
        for name, tensor in zip(self._NAMES, self.tensors):
            moved = fn(tensor)
            setattr(self, name, moved if moved.dtype == tensor.dtype else tensor.to(moved.device))
        return self

    def __getstate__(self):
        # FP8 tensors are saved as bytes, because plain pickle cannot save them.
        as_bytes = {name: getattr(self, name).view(torch.uint8) for name in ("qdata", "qdata_t")}
        return {**self.__dict__, "_buffers": {**self._buffers, **as_bytes}}

    def __setstate__(self, state):
        super().__setstate__(state)
        for name in ("qdata", "qdata_t"):
            self._buffers[name] = getattr(self, name).view(torch.float8_e4m3fn)

    @torch.no_grad()
    def refresh_(self, w: Tensor | None = None) -> "WeightCache":
        """Quantizes w again. Pass w if another tensor has replaced the parameter."""
        w = self._weights[0] if w is None else w
        if w.device == self.qdata.device:
            quantize_weights(self._as_taken(w.detach()), recipe=self.recipe, out=self.tensors)
        else:  # the buffers are on another device, for example on meta
            self._fill(w)
        self._weights[0], self._seen = w, _version_of(w)
        return self

    def is_of(self, w: Tensor) -> bool:
        return self._weights[0] is w

    def warn_if_stale(self, op: str) -> None:
        """Warns if w has changed since the last refresh_(): the product would use the old weights."""
        seen = _version_of(self._weights[0])
        if self._seen is not None and seen is not None and seen[0] == self._seen[0] and seen[1] != self._seen[1]:
            warnings.warn(
                f"{op}: the weights have changed since their cache was filled, and it still holds the old ones; "
                "moxie.refresh_after(model, optimizer) or refresh_() keeps it up to date",
                stacklevel=4,
            )

    def refresh_after(self, optimizer: torch.optim.Optimizer):
        """Calls refresh_() after every step of the optimizer. Remove the returned handle to stop that."""

        def refresh(*_) -> None:
            self.refresh_()

        return optimizer.register_step_post_hook(refresh)


def live_cache(cache: WeightCache | None, w: Tensor) -> WeightCache | None:
    """Returns the cache if it was made from w. If another tensor has replaced w, for example because the model was sharded, warns
    and returns None."""
    if cache is None or cache.is_of(w):
        return cache
    if not torch.compiler.is_compiling():
        warnings.warn(
            "a weight cache is of another tensor than the weight that is multiplied now, as when a model is sharded after it was "
            "filled, so the weight is quantized in every forward",
            stacklevel=3,
        )
    return None


def halves_of_interleaved(w: Tensor) -> Tensor:
    """Views an interleaved w13 or b13 [G, 2F, ..] as [G, 2, F, ..]: [:, 0] are the gate rows, [:, 1] the up rows."""
    return w.unflatten(1, (-1, 2)).transpose(1, 2)


def concatenated(w: Tensor) -> Tensor:
    """Copies an interleaved w13 or b13 [G, 2F, ..] to the concatenated layout: all gate rows, then all up rows."""
    return halves_of_interleaved(w).flatten(1, 2)


def _version_of(w: Tensor) -> tuple[int, int] | None:
    """Returns the id of w and its version counter, or None where there is none: in compiled graphs and in inference mode."""
    return None if torch.compiler.is_compiling() or w.is_inference() else (id(w), w._version)


def _of_cache(recipe: AnyRecipe) -> str:
    """The recipe as text, without what does not concern a weight cache: it has both forms, whatever a call would keep."""
    return _ops._recipe(str(recipe)).replace(",keep_w=false", "")


def _tensors(
    op: str, quantized_w: QuantizedWeights | None, recipe: AnyRecipe, layout: W13Layout = "concatenated"
) -> Sequence[Tensor] | None:
    if not isinstance(quantized_w, WeightCache):
        return quantized_w
    if quantized_w.w13_layout != layout:
        raise ValueError(f"{op}: the weight cache was made for the layout {quantized_w.w13_layout}, got {layout}")
    if quantized_w.recipe != str(recipe) and _of_cache(quantized_w.recipe) != _of_cache(recipe):
        raise ValueError(f"{op}: the weight cache was made for the recipe {quantized_w.recipe}, got {recipe}")
    if not torch.compiler.is_compiling():
        quantized_w.warn_if_stale(op)
    return quantized_w.tensors
