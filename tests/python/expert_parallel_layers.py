"""What the cases of test_expert_parallel.py share: an MoE layer in one process and one whose experts are spread over the ranks,
with the same weights, and the comparison of the two."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import moxie
import moxie.nn
from wire_reference import FLOOR, decibels, rounded_to_fp8

DIM, HIDDEN, EXPERTS, TOP_K, TOKENS = 160, 96, 8, 3, 20  # TOKENS on each rank
WIRES = {"bf16": ("unquantized",), "mxfp8_rceil": ("fp8", "unquantized"), "mxfp8_rceil_128": ("fp8", "unquantized")}


def cases_of(module: dict[str, Any]) -> tuple[list[str], Callable]:
    """Returns the names of a module's cases, in the order in which they run, and the decorator that adds one. ranks.py calls a
    case with a World."""
    names: list[str] = []

    def case(function, name=None):
        names.append(name or function.__name__)
        module[names[-1]] = lambda world: function(rank=world.rank, size=world.size)
        return module[names[-1]]

    return names, case


def inputs(kind: str, tokens: int, dtype) -> torch.Tensor:
    x = torch.randn(tokens, DIM)
    if kind == "heavy_tailed":
        x = x * torch.exp(2 * torch.randn(tokens, DIM))
    return x.to(dtype)


def layers(size: int, group, dtype=torch.bfloat16, skewed=False, **options):
    """Makes an MoE layer in one process and one whose experts are spread over the group, with the same weights."""
    wire, sizes = options.pop("wire", None), (options.pop("experts", EXPERTS), options.pop("top_k", TOP_K))
    torch.manual_seed(1)
    local = moxie.nn.MoE(DIM, HIDDEN, *sizes, dtype=dtype, **options)
    torch.manual_seed(1)
    parallel = moxie.nn.MoE(DIM, HIDDEN, *sizes, dtype=dtype, ep_group=group, wire=wire, **options)
    if skewed:  # the bias makes every token choose experts 0 to 2, so ranks without these experts get no rows
        with torch.no_grad():
            for layer in (local, parallel):
                layer.router.bias[:TOP_K] += 100
    return local, parallel


def step(layer, x, dy):
    x = x.clone().requires_grad_()
    y = layer(x)
    (y * dy).sum().backward() if dy.numel() == 0 else y.backward(dy)
    return y.detach(), x.grad


def summed(x: torch.Tensor) -> torch.Tensor:
    total = x.double()
    dist.all_reduce(total)
    return total


def shares(rank: int, size: int, counts=None):
    """Returns the slice of the concatenated tokens that belongs to this rank, and the number of all tokens."""
    counts = counts or [TOKENS] * size
    first = sum(counts[:rank])
    return slice(first, first + counts[rank]), sum(counts)


def gradients_of_rounded_tokens(layer, x, dy) -> dict[str, torch.Tensor]:
    """dw13 and dw2 of the layer's experts if x and dy were rounded to FP8 behind the router: what the FP8 wire gives."""
    trains = layer.router.training
    layer.router.eval()  # counts no tokens
    with torch.no_grad():
        routing = layer.router(x)
    layer.router.train(trains)
    offs, slot_of, row_of = moxie.route(routing.ids, len(layer.experts.w13))
    recipe, experts = str(layer.experts.recipe), layer.experts
    route = {"slot_of": slot_of, "row_of": row_of, "top_k": routing.ids.shape[1], "weights": routing.weights}
    y = experts(rounded_to_fp8(x, recipe), offs, **route)
    dw13, dw2 = torch.autograd.grad(y, [experts.w13, experts.w2], rounded_to_fp8(dy, recipe))
    return {"w13": dw13, "w2": dw2}


def compare(rank, size, local, parallel, x, dy, *, mine, wire, kind="normal", gate_db=45.0):
    y, dx = step(local, x, dy)
    y_mine, dx_mine = step(parallel, x[mine], dy[mine])
    assert torch.equal(y_mine, y[mine]), "y differs"
    assert torch.equal(dx_mine, dx[mine]), "dx differs"
    experts = len(parallel.experts.w13)
    of_rank = slice(rank * experts, (rank + 1) * experts)
    rounded = gradients_of_rounded_tokens(local, x, dy) if wire == "fp8" else {}
    for name in ("w13", "w2"):
        expected, actual = getattr(local.experts, name).grad[of_rank], getattr(parallel.experts, name).grad
        if wire == "unquantized":
            assert torch.equal(actual, expected), f"d{name} differs"
        else:
            assert torch.equal(actual, rounded[name][of_rank]), f"d{name} is not that of rounded tokens"
            assert decibels(actual, expected) >= FLOOR[kind], f"d{name}: {decibels(actual, expected)} dB"
    if local.experts.b13 is not None:
        assert torch.equal(parallel.experts.b13.grad, local.experts.b13.grad[of_rank]), "db13 differs"
        db2 = decibels(parallel.experts.b2.grad, local.experts.b2.grad[of_rank])
        assert db2 >= (45.0 if local.experts.b2.dtype == torch.bfloat16 else 100.0), f"db2: {db2} dB"
    gate = summed(parallel.router.gate.weight.grad)
    assert decibels(gate, local.router.gate.weight.grad) >= gate_db, f"gate: {decibels(gate, local.router.gate.weight.grad)} dB"


def error_of(call) -> Exception | None:
    try:
        call()
    except Exception as error:  # the caller checks the type and the message
        return error
    return None
