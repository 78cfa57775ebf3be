"""The implementations that bench/moe.py measures: one MoE layer in stock torch, SonicMoE and Moxie, with the same weights.

All compute the same function: SwiGLU MLPs, weighted by the softmax over a token's top_k experts.
"""

import dataclasses
import math
from collections.abc import Callable

import harness

# isort: split
import torch
from torch import nn

import moxie
import moxie.nn

STOCK, COMPILED, SONIC = "stock", "stock compiled", "SonicMoE"
RIVALS = ("stock", "compiled", "sonic")
SCREENED = 4  # steps of each way of compiled stock torch
# Also timed with cached weights, as in later micro-batches of a step, and with h kept in FP8.
CACHED = ("mxfp8_rceil_128",)


@dataclasses.dataclass
class Shape:
    tokens: int
    dim: int
    hidden_dim: int
    experts: int
    top_k: int

    def sizes(self) -> list[int]:
        return list(dataclasses.astuple(self))


@dataclasses.dataclass
class Weights:
    gate: nn.Parameter  # [E, D]
    w13: nn.Parameter  # [E, 2F, D], the gate above the up projection
    w2: nn.Parameter  # [E, D, F]


@dataclasses.dataclass
class Line:
    """One line of the table."""

    name: str
    forward: Callable[[torch.Tensor], torch.Tensor]
    parameters: list[nn.Parameter]
    ours: bool = False
    way: str = ""  # of compiled stock torch: one of MOVES


def random_weights(shape: Shape, device: str, dtype: torch.dtype = torch.bfloat16) -> Weights:
    def make(*sizes: int) -> nn.Parameter:
        weight = torch.empty(*sizes, device=device, dtype=dtype)
        return nn.Parameter(weight.normal_(std=1 / math.sqrt(sizes[-1])))

    return Weights(
        make(shape.experts, shape.dim),
        make(shape.experts, 2 * shape.hidden_dim, shape.dim),
        make(shape.experts, shape.dim, shape.hidden_dim),
    )


# How stock torch moves tokens to rows and back. Which way is fastest depends on the shape and on what torch.compile makes of
# it, so the layer is compiled in each, and the fastest of a few steps is the line that is measured.
#   gathers       gathers both ways, in gradients too: torch's own gradient of a gather does not know that no row comes twice
#   indexing      x[..]; a gradient is an index_put that accumulates
#   index_add     adds the weighted rows to the tokens; that gradient is a gather
MOVES = ("gathers", "indexing", "index_add")


class Gather(torch.autograd.Function):
    """rows[i] = x[index[i]], where x[j] goes to rows inverse[j * copies] .. inverse[(j + 1) * copies - 1]."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor, copies: int) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, drows: torch.Tensor):
        (inverse,) = ctx.saved_tensors
        return drows.index_select(0, inverse).view(-1, ctx.copies, drows.shape[1]).sum(1), None, None, None


def stock_forward(x: torch.Tensor, weights: Weights, top_k: int, move: str = "gathers") -> torch.Tensor:
    """x [T, D]. No synchronization and no data-dependent sizes, so torch.compile makes one graph of it."""
    scores = torch.softmax(x @ weights.gate.T, dim=-1, dtype=torch.float32)
    chosen, ids = scores.topk(top_k)
    chosen = (chosen / chosen.sum(-1, keepdim=True)).to(x.dtype)
    sorted_ids, slot_of = ids.flatten().sort(stable=True)  # R = T * k rows in order of expert
    experts = torch.arange(weights.gate.shape[0], device=x.device)
    offs = torch.searchsorted(sorted_ids, experts, right=True, out_int32=True)
    token_of = slot_of // top_k
    row_of = torch.empty_like(slot_of).scatter_(0, slot_of, torch.arange(slot_of.numel(), device=x.device))
    rows = Gather.apply(x, token_of, row_of, top_k) if move == "gathers" else x[token_of]
    gate, up = torch._grouped_mm(rows, weights.w13.mT, offs=offs).chunk(2, dim=-1)
    rows = torch._grouped_mm(nn.functional.silu(gate) * up, weights.w2.mT, offs=offs)
    if move == "index_add":
        weighted = rows * chosen.flatten().index_select(0, slot_of)[:, None]
        return torch.zeros_like(x).index_add(0, token_of, weighted)
    rows = Gather.apply(rows, row_of, slot_of, 1) if move == "gathers" else rows[row_of]
    return (rows.view(*ids.shape, -1) * chosen[..., None]).sum(1)


def stock_line(shape: Shape, weights: Weights, move: str = "gathers") -> Line:
    return Line(STOCK, lambda x: stock_forward(x, weights, shape.top_k, move), list(vars(weights).values()))


def steps_of(line: Line, x: torch.Tensor, dy: torch.Tensor, count: int) -> float:
    """Seconds of each of `count` steps in a row, after one that does not count: it may compile."""

    def step() -> None:
        for leaf in (x, *line.parameters):
            leaf.grad = None
        line.forward(x).backward(dy)

    step()
    return harness.laps([lambda: [step() for _ in range(count)]], x.device.type)[0] / count


def compiled_line(shape: Shape, weights: Weights, x: torch.Tensor, dy: torch.Tensor) -> Line:
    """Stock torch compiled, in the fastest of MOVES that compile. Raises the last error if none does."""
    seconds: dict[float, Line] = {}
    for move in MOVES:
        line = stock_line(shape, weights, move)
        forward = torch.compile(line.forward, dynamic=False, fullgraph=True)
        line = dataclasses.replace(line, name=COMPILED, forward=forward, way=move)
        try:
            seconds[steps_of(line, x, dy, SCREENED)] = line
        except RuntimeError as error:
            print(f"{COMPILED}, {move} was not measured: {error}"[:200])
            failed = error
    if not seconds:
        raise failed
    return seconds[min(seconds)]


def sonic_line(shape: Shape, weights: Weights) -> Line:
    """Raises ImportError if SonicMoE is not installed."""
    from sonicmoe import KernelBackendMoE, MoE
    from sonicmoe.enums import ActivationType

    with torch.device(weights.w13.device):
        layer = MoE(
            num_experts=shape.experts,
            num_experts_per_tok=shape.top_k,
            hidden_size=shape.dim,
            intermediate_size=shape.hidden_dim,
            activation_function=ActivationType.SWIGLU,
            add_bias=False,
            std=0.02,
        )
    layer.to(weights.w13.dtype)
    layer.router.weight, layer.c_proj.weight = weights.gate, weights.w2
    with torch.no_grad():  # SonicMoE interleaves the rows of gate and up
        halves = weights.w13.view(shape.experts, 2, shape.hidden_dim, shape.dim)
        layer.c_fc.weight.copy_(halves.transpose(1, 2).flatten(1, 2))
    forward = lambda x: layer(x, kernel_backend_moe=KernelBackendMoE.sonicmoe)[0]
    return Line(SONIC, forward, list(layer.parameters()))


def our_line(shape: Shape, weights: Weights, recipe: str, *, weight_cache: bool = False, keep: str = "h") -> Line:
    make = {"device": weights.w13.device, "dtype": weights.w13.dtype}
    layer = moxie.nn.MoE(shape.dim, shape.hidden_dim, shape.experts, shape.top_k, recipe=recipe, keep=keep, **make)
    layer.router.gate.weight, layer.experts.w13, layer.experts.w2 = weights.gate, weights.w13, weights.w2
    layer.experts.set_recipe_(recipe, weight_cache=weight_cache)
    more = [", weight cache"] * weight_cache + [", h in FP8"] * (keep == "h_fp8")
    return Line(f"Moxie {recipe}{''.join(more)}", layer, list(layer.parameters()), ours=True)


def lines_of(
    shape: Shape, weights: Weights, rivals: list[str], recipes: list[str], variants: bool = True
) -> tuple[list[Line], dict[str, str]]:
    """The lines, and the reason for each rival that cannot run here. variants: with cached weights, and with h in FP8."""
    torch._dynamo.reset()  # the graphs of another shape; torch would make the second shape's dynamic
    x = torch.randn(shape.tokens, shape.dim, device=weights.w13.device, dtype=weights.w13.dtype, requires_grad=True)
    dy = torch.randn_like(x)
    makers = {
        "stock": (STOCK, lambda: stock_line(shape, weights)),
        "compiled": (COMPILED, lambda: compiled_line(shape, weights, x, dy)),
        "sonic": (SONIC, lambda: sonic_line(shape, weights)),
    }
    lines, missing = [], {}
    for name, make in (makers[rival] for rival in rivals):
        try:
            line = make()
            steps_of(line, x, dy, 1)  # compiles
            lines.append(line)
        except Exception as error:  # any error of another project: the others are still measured
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        for weight in vars(weights).values():
            weight.grad = None
    for recipe in recipes:
        lines.append(our_line(shape, weights, recipe))
        if recipe in CACHED:
            lines.append(our_line(shape, weights, recipe, weight_cache=True))
            lines += [our_line(shape, weights, recipe, keep="h_fp8")] * variants
    return lines, missing
