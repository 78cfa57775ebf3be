"""moxie.explain: which kernels a grouped product would use, and why."""

import dataclasses

import torch

from moxie.recipe import AnyRecipe

_ops = torch.ops.moxie
_PASSES = ("forward", "dgrad", "wgrad")


@dataclasses.dataclass(frozen=True)
class ExplainedPass:
    """The plan of one pass: its kernel, its operands a and b, and why no faster kernel is used (empty if this is the fastest)."""

    kernel: str
    a: str
    b: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The plan of one grouped product and its gradients. `print` it, or read its fields.

    >>> moxie.explain("bf16", 64, 96, device="cpu").wgrad.b
    'x_t bf16'
    """

    recipe: str
    forward: ExplainedPass
    dgrad: ExplainedPass
    wgrad: ExplainedPass
    x_bytes: int
    w_bytes: int

    def __str__(self) -> str:
        lines = [self.recipe]
        for name in _PASSES:
            told = getattr(self, name)
            lines.append(f"{name}: {told.kernel} ({told.a}, {told.b})" + (f"; {told.reason}" if told.reason else ""))
        lines.append(f"kept for backward: {self.x_bytes:,} bytes of x, {self.w_bytes:,} bytes of w")
        return "\n".join(lines)


def explain(
    recipe: AnyRecipe,
    n: int,
    k: int,
    *,
    rows: int = 0,
    groups: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype | None = None,
    needs_dx: bool = True,
    needs_dw: bool = True,
    main_grad: bool = False,
) -> Explanation:
    """Explains what `grouped_mm` would do with x [rows, k] and w [groups, n, k], without running it: the kernel and operands of
    each pass, why no faster kernel is used, and the bytes kept for backward. If `groups` is None, the call is one without offs.

    `device` defaults to the current GPU, or to the CPU if there is no GPU. `dtype` is the dtype of x, and `weight_dtype` that of
    w (None: the same as x).

    >>> told = moxie.explain("mxfp8_rceil_128", 2048, 7168, rows=8192, groups=8, device="cpu")
    >>> told.forward.kernel, told.forward.reason
    ('decode, mm', 'a CPU has no FP8 product')
    >>> print(told)
    mxfp8_rceil:rule=rceil,activations=1x128,weights=128x128,wgrad_dy=128x1,wgrad_x=128x32,wgrad_with_hp=false,kernels=auto,out=input
    forward: decode, mm (x e4m3 1x128 plain, w e4m3 128x128 plain); a CPU has no FP8 product
    dgrad: decode, mm (dy e4m3 1x128 plain, w_t e4m3 128x128 plain); a CPU has no FP8 product
    wgrad: decode, mm (dy_t e4m3 128x1 plain, x_t e4m3 128x32 plain); a CPU has no FP8 product
    kept for backward: 66,076,416 bytes of x, 117,447,680 bytes of w
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    text, (x_bytes, w_bytes) = _ops._explain(
        str(recipe), n, k, torch.device(device), rows, groups, dtype, weight_dtype or dtype, needs_dx, needs_dw, main_grad
    )
    passes = {name: ExplainedPass(*text[4 * i : 4 * i + 4]) for i, name in enumerate(_PASSES)}
    return Explanation(recipe=_ops._recipe(str(recipe)), x_bytes=x_bytes, w_bytes=w_bytes, **passes)
