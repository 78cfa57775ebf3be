"""Cases of test_expert_parallel.py: results and gradients over a group have the bits of one process."""

import functools

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from expert_parallel_layers import EXPERTS, WIRES, cases_of, compare, inputs, layers, shares, step

NAMES, case = cases_of(globals())


def exactness(recipe, wire, kind, dtype, rank, size):
    local, parallel = layers(
        size, dist.group.WORLD, dtype, skewed=kind == "skewed", recipe=recipe, wire=wire, score="sigmoid", balance="bias"
    )
    torch.manual_seed(2)
    mine, total = shares(rank, size)
    x, dy = inputs(kind, total, dtype), inputs(kind, total, dtype)
    compare(
        rank,
        size,
        local,
        parallel,
        x,
        dy,
        mine=mine,
        wire=wire,
        kind="heavy_tailed" if kind == "heavy_tailed" else "normal",
        gate_db=90.0 if dtype == torch.float32 else 45.0,
    )


for _recipe, _wires in WIRES.items():
    for _wire in _wires:
        for _kind in ("normal", "heavy_tailed", "skewed"):
            for _dtype in (torch.bfloat16, torch.float32):
                _name = f"the_bits_are_those_of_one_process_{_recipe}_{_wire}_{_kind}_{str(_dtype)[6:]}"
                case(functools.partial(exactness, _recipe, _wire, _kind, _dtype), _name)


@case
def options_of_the_layer_keep_their_meaning(rank, size):
    mine, total = shares(rank, size)
    for options in (
        {"weight_cache": True},
        {"keep": "h_fp8"},
        {"shared_hidden_dim": 64},
        {"recipe": "fp8_rowwise"},
        {"recipe": "mxfp8_rceil_wgrad_with_hp"},
        {"recipe": "mxfp8_rceil_32x32", "weight_cache": True},
        {"activation": "clamped_swiglu", "bias": True, "w13_layout": "interleaved", "transposed": True},
        {"recipe": "mxfp8_rceil", "bias": True, "keep": "h_fp8", "wire": "unquantized"},
        {"recipe": "bf16", "bias": True, "w13_layout": "interleaved"},
        {"activation": "clamped_swiglu", "transposed": True, "weight_cache": True},
    ):
        local, parallel = layers(size, dist.group.WORLD, **options)
        torch.manual_seed(7)
        x, dy = inputs("normal", total, torch.bfloat16), inputs("normal", total, torch.bfloat16)
        compare(rank, size, local, parallel, x, dy, mine=mine, wire=parallel.experts.wire)


@case
def one_expert_per_rank_has_the_bits_of_one_process(rank, size):
    # Then y is sent as the product left it.
    mine, total = shares(rank, size)
    for wire in ("fp8", "unquantized"):
        local, parallel = layers(size, dist.group.WORLD, experts=size, top_k=min(size, 2), wire=wire)
        torch.manual_seed(8)
        x, dy = inputs("normal", total, torch.bfloat16), inputs("normal", total, torch.bfloat16)
        compare(rank, size, local, parallel, x, dy, mine=mine, wire=wire)


@case
def biases_in_f32_have_the_gradients_of_one_process(rank, size):
    local, parallel = layers(size, dist.group.WORLD, torch.float32, bias=True, score="sigmoid")
    mine, total = shares(rank, size)
    torch.manual_seed(12)
    x, dy = inputs("normal", total, torch.float32), inputs("normal", total, torch.float32)
    compare(rank, size, local, parallel, x, dy, mine=mine, wire="fp8", gate_db=90.0)


@case
def main_gradients_are_those_of_one_process(rank, size):
    experts = EXPERTS // size
    of_rank = slice(rank * experts, (rank + 1) * experts)
    mine, total = shares(rank, size)
    for options in ({}, {"w13_layout": "interleaved"}, {"transposed": True}):
        local, parallel = layers(size, dist.group.WORLD, main_grad=True, wire="unquantized", **options)
        for layer in (local, parallel):
            for weight in (layer.experts.w13, layer.experts.w2):
                weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
        torch.manual_seed(14)
        x, dy = inputs("normal", total, torch.bfloat16), inputs("normal", total, torch.bfloat16)
        _, dx = step(local, x, dy)
        _, dx_mine = step(parallel, x[mine], dy[mine])
        assert torch.equal(dx_mine, dx[mine])
        for name in ("w13", "w2"):
            whole, own = getattr(local.experts, name), getattr(parallel.experts, name)
            assert own.grad is None and torch.equal(own.main_grad, whole.main_grad[of_rank]), (name, options)


@case
def autocast_gives_the_bits_of_one_process(rank, size):
    local, parallel = layers(size, dist.group.WORLD, dtype=torch.float32)
    mine, total = shares(rank, size)
    torch.manual_seed(8)
    x, dy = inputs("normal", total, torch.float32), inputs("normal", total, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        y, dx = step(local, x, dy)
        y_mine, dx_mine = step(parallel, x[mine], dy[mine])
    assert y_mine.dtype == y.dtype == torch.bfloat16
    assert torch.equal(y_mine, y[mine]) and torch.equal(dx_mine, dx[mine])


@case
def a_checkpointed_layer_gives_the_same_bits(rank, size):
    local, parallel = layers(size, dist.group.WORLD)
    mine, total = shares(rank, size)
    torch.manual_seed(9)
    x, dy = inputs("normal", total, torch.bfloat16), inputs("normal", total, torch.bfloat16)
    _, dx = step(local, x, dy)
    _, dx_mine = step(lambda own: checkpoint(parallel, own, use_reentrant=False), x[mine], dy[mine])
    assert torch.equal(dx_mine, dx[mine])


@case
def a_compiled_layer_gives_the_same_bits(rank, size):
    if size != 2:  # tracing takes seconds, and one number of ranks is enough
        return
    local, parallel = layers(size, dist.group.WORLD, balance="loss")
    mine, total = shares(rank, size)
    torch.manual_seed(11)
    x, dy = inputs("normal", total, torch.bfloat16), inputs("normal", total, torch.bfloat16)
    y, dx = step(local, x, dy)
    y_mine, dx_mine = step(torch.compile(parallel, backend="aot_eager"), x[mine], dy[mine])
    assert torch.equal(y_mine, y[mine]) and torch.equal(dx_mine, dx[mine])
