"""A reference for grouped_mm: quantizes and dequantizes the operands, then multiplies in f32. Its gradients treat the quantizers
as the identity (straight-through)."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import torch

import moxie
from support import assert_same_bytes, block_shape, sizes_to_offs


def sqnr(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Signal to noise in dB."""
    actual, reference = actual.detach().double(), reference.detach().double()
    noise = ((actual - reference) ** 2).sum().item()
    return math.inf if noise == 0 else 10 * math.log10((reference**2).sum().item() / noise)


@dataclasses.dataclass
class Problem:
    x: torch.Tensor  # [R, K]
    w: torch.Tensor  # [G, N, K]
    dy: torch.Tensor  # [R, N]
    offs: torch.Tensor | None
    bias: torch.Tensor | None = None

    def on(self, device: str) -> "Problem":
        move = lambda tensor: None if tensor is None else tensor.to(device)
        return Problem(*(move(getattr(self, field.name)) for field in dataclasses.fields(self)))


def gaussian(
    sizes, n: int, k: int, *, tail: int = 0, device: str = "cpu", dtype=torch.bfloat16, w_dtype=None, bias=None, seed: int = 0
) -> Problem:
    """Makes a problem with Gaussian values, groups of these sizes, and `tail` rows past the last group. bias is None, "n" (one
    for all groups) or "gn" (one per group)."""
    generator = torch.Generator().manual_seed(seed)
    rows, groups = sum(sizes) + tail, len(sizes)
    normal = lambda *shape: torch.randn(shape, generator=generator)
    x, w, dy = normal(rows, k).to(dtype), normal(groups, n, k).to(w_dtype or dtype), normal(rows, n).to(dtype)
    shape = {None: None, "n": (n,), "gn": (groups, n)}[bias]
    return Problem(x, w, dy, sizes_to_offs(sizes), None if shape is None else normal(*shape).to(dtype)).on(device)


@dataclasses.dataclass
class Results:
    y: torch.Tensor
    dx: torch.Tensor | None = None
    dw: torch.Tensor | None = None
    dbias: torch.Tensor | None = None
    before_bias: torch.Tensor | None = None  # |y| before the bias was added; None without a bias

    def __iter__(self):
        return iter((self.y, self.dx, self.dw))

    def on(self, device: str) -> "Results":
        return Results(*(tensor.to(device) for tensor in self))


def varied(sizes, n: int = 96, k: int = 160, **kwargs) -> Problem:
    """Makes a problem in which neighbouring blocks have different scales, so that reading a wrong scale changes the result."""
    problem = gaussian(sizes, n, k, tail=7, **kwargs)
    for t in (problem.x, problem.w, problem.dy):
        t *= torch.exp2(torch.randint(-9, 10, t.shape)).to(t.dtype)
    return problem


def run(problem: Problem, recipe="mxfp8_rceil_128", **kwargs) -> Results:
    """Runs grouped_mm forward and backward, with dy cast to the dtype of y. Returns y and the gradients."""
    x, w = problem.x.detach().requires_grad_(), problem.w.detach().requires_grad_()
    bias = None if problem.bias is None else problem.bias.detach().requires_grad_()
    y = moxie.grouped_mm(x, w, problem.offs, recipe=recipe, bias=bias, **kwargs)
    y.backward(problem.dy.to(y.dtype))
    return Results(y.detach(), x.grad, w.grad, None if bias is None else bias.grad)


def bounds(problem: Problem) -> list[tuple[int, int]]:
    ends = [len(problem.x)] if problem.offs is None else problem.offs.tolist()
    return list(zip([0, *ends], ends))


# ---- operands, decoded -----------------------------------------------------------------------------------------------------


def transposed(block: str) -> str:
    """Returns the block size to quantize w's colwise form with, given that of its rowwise form: 1x32 becomes 32x1, and square
    blocks stay."""
    rows, cols = block_shape(block)
    return f"{cols}x1" if rows == 1 else block


def decoded_per_row(x, offs):
    qdata, scale = moxie.quantize_per_row(x, offs=offs)
    return qdata.float() * scale.unsqueeze(-1)


def decoded_per_col(x, problem):
    """Quantizes each group of x by columns and decodes it to f32. Groups are separate calls, because each has its own scale per
    column."""
    out = torch.zeros(x.shape, device=x.device)
    for begin, end in bounds(problem):
        qdata_t, scale_t = moxie.quantize_per_col(x[begin:end])
        out[begin:end] = (qdata_t.float()[:, : end - begin] * scale_t.view(-1, 1)).T
    return out


@dataclasses.dataclass
class Operands:
    """The operands of the three passes (forward, dgrad, wgrad), quantized, decoded to f32 and not transposed."""

    x: torch.Tensor
    w: torch.Tensor
    dy: torch.Tensor
    w_dgrad: torch.Tensor
    dy_wgrad: torch.Tensor
    x_wgrad: torch.Tensor


def decoded_operands(problem: Problem, recipe: moxie.Recipe, dy: torch.Tensor) -> Operands:
    x, w, offs = problem.x, problem.w, problem.offs
    hp = lambda tensor: tensor.bfloat16().float()
    if recipe.scaling == "none":
        return Operands(hp(x), hp(w), hp(dy), hp(w), hp(dy), hp(x))
    if recipe.scaling == "row":
        w_t = torch.stack([(lambda q, s: (q.float() * s.view(-1, 1)).T[: w.shape[1]])(*moxie.quantize_per_col(m)) for m in w])
        out = Operands(
            decoded_per_row(x, offs),
            decoded_per_row(w, None),
            decoded_per_row(dy, offs),
            w_t,
            decoded_per_col(dy, problem),
            decoded_per_col(x, problem),
        )
    else:
        rule, f32 = recipe.rule, torch.float32

        def rowwise(tensor, block, offs):
            form = moxie.quantize_rowwise(tensor, offs=offs, block=block, rule=rule)
            return moxie.dequantize_rowwise(*form, offs=offs, block=block, dtype=f32)

        def colwise(tensor, block, offs):
            form = moxie.quantize_colwise(tensor, offs=offs, block=block, rule=rule)
            return moxie.dequantize_colwise(*form, tensor.shape[-2], offs=offs, block=block, dtype=f32)

        act = recipe.activations
        seen = x
        out = Operands(
            rowwise(x, act, offs),
            rowwise(w, recipe.weights, None),
            rowwise(dy, act, offs),
            colwise(w, transposed(recipe.weights), None),
            colwise(dy, recipe.wgrad_dy, offs),
            colwise(seen, recipe.wgrad_x, offs),
        )
    if recipe.wgrad_with_hp:
        out.dy_wgrad, out.x_wgrad = hp(dy), hp(x)
    return out


# ---- products --------------------------------------------------------------------------------------------------------------


def products(operands: Operands, problem: Problem) -> Results:
    y = torch.zeros(len(problem.x), problem.w.shape[1], device=problem.x.device)
    dx, dw = torch.zeros(problem.x.shape, device=y.device), torch.zeros(problem.w.shape, device=y.device)
    for g, (begin, end) in enumerate(bounds(problem)):
        rows = slice(begin, end)
        y[rows] = operands.x[rows] @ operands.w[g].T
        dx[rows] = operands.dy[rows] @ operands.w_dgrad[g]
        dw[g] = operands.dy_wgrad[rows].T @ operands.x_wgrad[rows]
    return Results(y, dx, dw)


def add_bias(y, problem: Problem) -> torch.Tensor:
    """Adds the bias to y in place. Returns the magnitude of the bias that each row got."""
    spread = torch.zeros_like(y)
    if problem.bias is not None:
        for g, (begin, end) in enumerate(bounds(problem)):
            spread[begin:end] = problem.bias.float() if problem.bias.dim() == 1 else problem.bias[g].float()
    y += spread
    return spread.abs()


def straight_through(problem: Problem, recipe, y_dtype: torch.dtype | None = None) -> tuple[Results, Results]:
    """Computes the results of a recipe and, for each element, the sum of the magnitudes of the terms that were added up for
    it."""
    if isinstance(recipe, str):
        recipe = moxie.Recipe.from_name(recipe)
    if y_dtype is None:
        y_dtype = problem.x.dtype if recipe.out == "input" else getattr(torch, recipe.out)
    dy = problem.dy.to(y_dtype)
    operands = decoded_operands(problem, recipe, dy)
    results = products(operands, problem)
    magnitudes = products(Operands(*(getattr(operands, f.name).abs() for f in dataclasses.fields(operands))), problem)
    if problem.bias is not None:
        magnitudes.before_bias = results.y.abs()
    magnitudes.y += add_bias(results.y, problem)
    if problem.bias is not None:
        sums = [torch.stack([t[begin:end].float().sum(0) for begin, end in bounds(problem)]) for t in (dy, dy.abs())]
        results.dbias, magnitudes.dbias = sums if problem.bias.dim() == 2 else [s.sum(0) for s in sums]
    return results, magnitudes


def assert_products_equal(actual, expected, magnitude, what: str = "", before_bias=None) -> None:
    """Asserts that the results differ by no more than another order of summation and rounding to their dtype explain."""
    # On a GPU the allowance is larger: FP8 tensor cores keep fewer bits than f32 while they add the products of one instruction.
    order = 2.0**-18 if actual.device.type == "cpu" else 2.0**-11
    rounding = 2.0**-8 if actual.dtype == torch.bfloat16 else 2.0**-20
    allowed = rounding * expected.abs() + order * magnitude
    if before_bias is not None and actual.device.type == "cuda":
        allowed += rounding * before_bias  # torch's product is rounded before the bias is added (NUMERICS.md, section 10)
    error = (actual.float() - expected).abs()
    wrong = ~(error <= allowed)
    assert not wrong.any(), (
        f"{what}: {int(wrong.sum())} of {wrong.numel()} differ, first at {wrong.nonzero()[0].tolist()}: "
        f"{actual[wrong][0]} is not {expected[wrong][0]}, allowed {allowed[wrong][0]}"
    )


def assert_straight_through(problem: Problem, recipe, **kwargs) -> Results:
    actual = run(problem, recipe, **kwargs)
    expected, magnitude = straight_through(problem, recipe, actual.y.dtype)
    for name in ("y", "dx", "dw", "dbias"):
        if getattr(expected, name) is not None:
            before_bias = magnitude.before_bias if name == "y" else None
            assert_products_equal(getattr(actual, name), getattr(expected, name), getattr(magnitude, name), name, before_bias)
    return actual


def decoded_product(problem: Problem, recipe: str) -> Results:
    """Quantizes the operands with plain scales, decodes them to bf16 and multiplies those. Returns y, dx and dw."""
    fields, offs, rows = moxie.Recipe.from_name(recipe), problem.offs, len(problem.x)
    rowwise = lambda t, block, **of: moxie.dequantize_rowwise(
        *moxie.quantize_rowwise(t, block=block, rule=fields.rule, **of), block=block, **of
    )
    colwise = lambda t, block, **of: moxie.dequantize_colwise(
        *moxie.quantize_colwise(t, block=block, rule=fields.rule, **of), t.shape[-2], block=block, **of
    )
    w, w_t = rowwise(problem.w, fields.weights), colwise(problem.w, transposed(fields.weights))
    x, dy = (rowwise(t, fields.activations, offs=offs) for t in (problem.x, problem.dy))
    x_t, dy_t = problem.x, problem.dy
    if not fields.wgrad_with_hp:
        x_t, dy_t = colwise(x_t, fields.wgrad_x, offs=offs), colwise(dy_t, fields.wgrad_dy, offs=offs)
    multiply = {"recipe": "bf16", "dtype": torch.bfloat16}
    return Results(
        moxie.grouped_fwd(x, None, w, None, offs, **multiply),
        torch.ops.moxie.grouped_dgrad(dy, None, w_t, None, offs, **multiply),
        torch.ops.moxie.grouped_wgrad(dy_t, None, x_t, None, rows, offs, **multiply),
    )


def assert_same_results(actual, expected, what="") -> None:
    for name, a, b in zip(("y", "dx", "dw"), actual, expected):
        assert_same_bytes(a, b, f"{what} {name}")


@contextlib.contextmanager
def pretended_gpu(kind: str, stand_in: Callable) -> Iterator[list]:
    """Makes Moxie plan every call as for a GPU of this kind. On a CPU, stand_in(calls, ...) replaces torch's scaled grouped
    product; it may record its calls in the list `calls`, which this yields."""
    calls, library = [], torch.library.Library("aten", "IMPL")
    library.impl("_scaled_grouped_mm", functools.partial(stand_in, calls), "CPU")
    torch.ops.moxie._pretend_gpu(kind)
    try:
        yield calls
    finally:
        torch.ops.moxie._pretend_gpu("")
        library._destroy()
