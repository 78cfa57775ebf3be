"""Cases of test_expert_parallel.py: ranks that have no tokens, train other things or are in another mode than others."""

import torch
import torch.distributed as dist

from expert_parallel_layers import DIM, TOKENS, TOP_K, cases_of, compare, inputs, layers, shares, step

NAMES, case = cases_of(globals())


@case
def ranks_without_tokens_take_part(rank, size):
    for counts in ([0] + [TOKENS] * (size - 1), [TOKENS] + [0] * (size - 1), [0] * size):
        local, parallel = layers(size, dist.group.WORLD, recipe="mxfp8_rceil_128")
        torch.manual_seed(3)
        mine, total = shares(rank, size, counts)
        x, dy = inputs("normal", total, torch.bfloat16), inputs("normal", total, torch.bfloat16)
        if total:
            compare(rank, size, local, parallel, x, dy, mine=mine, wire="fp8")
        else:
            y, dx = step(parallel, x, dy)
            assert y.shape == dx.shape == (0, DIM)
            assert parallel.experts.w13.grad.count_nonzero() == 0


@case
def frozen_experts_pass_gradients_on(rank, size):
    for frozen in (["w13", "w2"], ["w2"], ["w13"]):
        local, parallel = layers(size, dist.group.WORLD, recipe="mxfp8_rceil")
        for layer in (local, parallel):
            for name in frozen:
                getattr(layer.experts, name).requires_grad_(False)
        mine, total = shares(rank, size)
        torch.manual_seed(4)
        x, dy = inputs("normal", total, torch.bfloat16), inputs("normal", total, torch.bfloat16)
        y, dx = step(local, x, dy)
        y_mine, dx_mine = step(parallel, x[mine], dy[mine])
        assert torch.equal(y_mine, y[mine]) and torch.equal(dx_mine, dx[mine])
        assert all(getattr(parallel.experts, name).grad is None for name in frozen)


@case
def a_rank_may_freeze_what_others_train(rank, size):
    local, parallel = layers(size, dist.group.WORLD, recipe="mxfp8_rceil")
    if rank == size - 1:
        parallel.experts.requires_grad_(False)
    mine, total = shares(rank, size)
    torch.manual_seed(4)
    x, dy = inputs("normal", total, torch.bfloat16), inputs("normal", total, torch.bfloat16)
    y, dx = step(local, x, dy)
    y_mine, dx_mine = step(parallel, x[mine], dy[mine])
    assert torch.equal(y_mine, y[mine]) and torch.equal(dx_mine, dx[mine])


@case
def a_rank_may_freeze_biases_that_others_train(rank, size):
    local, parallel = layers(size, dist.group.WORLD, bias=True)
    if rank == size - 1:
        parallel.experts.b2.requires_grad_(False)
    mine, total = shares(rank, size)
    torch.manual_seed(13)
    x, dy = inputs("normal", total, torch.bfloat16), inputs("normal", total, torch.bfloat16)
    _, dx = step(local, x, dy)
    _, dx_mine = step(parallel, x[mine], dy[mine])
    assert torch.equal(dx_mine, dx[mine])
    assert (parallel.experts.b2.grad is None) == (rank == size - 1)


@case
def the_gradient_of_x_may_be_wanted_on_some_ranks(rank, size):
    local, parallel = layers(size, dist.group.WORLD, recipe="mxfp8_rceil")
    for layer in (local, parallel):
        layer.router.requires_grad_(False)
    mine, total = shares(rank, size)
    torch.manual_seed(4)
    x, dy = inputs("normal", total, torch.bfloat16), inputs("normal", total, torch.bfloat16)
    _, dx = step(local, x, dy)
    own = x[mine].clone().requires_grad_(rank == 0)
    parallel(own).backward(dy[mine])
    assert rank != 0 or torch.equal(own.grad, dx[mine])


@case
def evaluation_mode_on_some_ranks_is_defined(rank, size):
    local, parallel = layers(size, dist.group.WORLD, score="sigmoid", balance="bias")
    parallel.train(rank == 0)
    mine, total = shares(rank, size)
    torch.manual_seed(6)
    x, dy = inputs("normal", total, torch.bfloat16), inputs("normal", total, torch.bfloat16)
    compare(rank, size, local, parallel, x, dy, mine=mine, wire="fp8")
    assert parallel.router.load.sum() == (TOKENS * TOP_K if rank == 0 else 0)
