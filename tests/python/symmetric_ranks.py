"""Ranks of the symmetric engine as threads of one process, which share the memory of a CPU: every rank calls the op itself, with
weights of its own experts. On a GPU ranks are processes (expert_parallel_cuda_cases.py)."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import moxie
from wire_reference import rounded_to_fp8

_ops = torch.ops.moxie


@dataclasses.dataclass
class Problem:
    """A layer of all experts, and tokens of all ranks with their route."""

    x: Tensor
    w13: Tensor
    w2: Tensor
    ids: Tensor
    weights: Tensor
    dy: Tensor
    recipe: str
    b13: Tensor | None = None
    b2: Tensor | None = None

    @property
    def experts(self) -> int:
        return self.w13.shape[0]

    @property
    def top_k(self) -> int:
        return self.ids.shape[1]


def problem(
    tokens: int,
    *,
    dim=160,
    hidden=96,
    experts=8,
    top_k=3,
    dtype=torch.bfloat16,
    recipe="mxfp8_rceil",
    skewed=False,
    bias=False,
):
    scores = torch.rand(tokens, experts)
    if skewed:
        scores[:, :top_k] += 1
    made = Problem(
        x=torch.randn(tokens, dim).to(dtype),
        w13=(torch.randn(experts, 2 * hidden, dim) / dim**0.5).to(dtype),
        w2=(torch.randn(experts, dim, hidden) / hidden**0.5).to(dtype),
        ids=scores.topk(top_k).indices.to(torch.int32),
        weights=torch.rand(tokens, top_k),
        dy=torch.randn(tokens, dim).to(dtype),
        recipe=recipe,
    )
    if bias:
        made.b13 = torch.randn(experts, 2 * hidden).to(dtype)
        made.b2 = torch.randn(experts, dim).to(dtype)
    return made


def with_rounded_tokens(of: Problem) -> Problem:
    """Tokens as they come out of the FP8 wire. The weight gradients of one process are then those of the wire."""
    return dataclasses.replace(of, x=rounded_to_fp8(of.x, of.recipe), dy=rounded_to_fp8(of.dy, of.recipe))


@dataclasses.dataclass
class Grads:
    y: Tensor
    x: Tensor
    weights: Tensor
    w13: Tensor
    w2: Tensor
    b13: Tensor | None = None
    b2: Tensor | None = None


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def biases(of: Problem, experts: slice = slice(None)) -> dict[str, Tensor]:
    """The biases of these experts as leaves, by argument; none if the layer has none."""
    given = {"b13": of.b13, "b2": of.b2}
    return {name: leaves(bias[experts])[0] for name, bias in given.items() if bias is not None}


def one_process(of: Problem) -> Grads:
    x, w13, w2, weights = leaves(of.x, of.w13, of.w2, of.weights)
    bias = biases(of)
    offs, slot_of, row_of = moxie.moe.route(of.ids, of.experts)
    route = {"slot_of": slot_of, "row_of": row_of, "top_k": of.top_k, "weights": weights}
    y = _ops.expert_mlp(x, w13, w2, offs, recipe=of.recipe, **route, **bias)
    y.backward(of.dy)
    return Grads(y.detach(), x.grad, weights.grad, w13.grad, w2.grad, *(tensor.grad for tensor in bias.values()))


def b2_gradient_by_rank(of: Problem, counts: list[int]) -> Tensor:
    """The gradient of b2 as ranks with so many tokens compute it: each sums over its own tokens in f32, and these sums are added
    in order of rank."""
    assert of.b2 is not None
    sums = []
    for rank, count in enumerate(counts):
        mine = slice(sum(counts[:rank]), sum(counts[:rank]) + count)
        part = {name: getattr(of, name)[mine] for name in ("x", "ids", "weights", "dy")}
        made = one_process(dataclasses.replace(of, **part, b2=of.b2.float())).b2
        sums.append(torch.zeros_like(of.b2, dtype=torch.float32) if made is None else made)
    return torch.stack(sums).sum(0).to(of.b2.dtype)


class Ranks:
    """Memory of so many ranks. Calls of `run` give each rank's thread its number."""

    def __init__(self, size: int, of: Problem, *, wire: str, rows: int, tokens: int, timeout_ms: int = 120_000):
        self.size, self.wire, self.timeout_ms, self.limits = size, wire, timeout_ms, [rows, tokens]
        self.capacity = _ops._exchange_capacity(
            size, of.experts, of.x.shape[1], self.limits, of.x.dtype, recipe=of.recipe, wire=wire, bias=of.b2 is not None
        )
        count = _ops._exchange_bytes(size, self.capacity)
        # Poisoned behind the head, which is zero at first.
        self.memory = [torch.full((count,), 0xA5, dtype=torch.uint8) for _ in range(size)]
        for memory in self.memory:
            memory[:1024] = 0
        self.status = [torch.zeros(5, dtype=torch.int64) for _ in range(size)]

    def call(self, rank: int, x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, recipe: str, **options) -> Tensor:
        offs, slot_of, row_of = moxie.moe.route(ids, w13.shape[0] * self.size)
        return _ops.expert_mlp.symmetric(
            x,
            w13,
            w2,
            weights,
            offs,
            slot_of,
            row_of,
            self.memory[rank],
            self.status[rank],
            [memory.data_ptr() for memory in self.memory],
            self.capacity,
            self.limits,
            rank,
            self.timeout_ms,
            "threads",
            recipe=recipe,
            wire=self.wire,
            **options,
        )

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """What body(rank) returns or raises, by rank."""
        results: list[Any] = [None] * self.size

        def work(rank: int) -> None:
            try:
                results[rank] = body(rank)
            except Exception as error:  # the caller looks at it
                results[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def share_of_experts(of: Problem, size: int, rank: int) -> slice:
    local = of.experts // size
    return slice(rank * local, (rank + 1) * local)


def step(ranks: Ranks, of: Problem, counts: list[int], rank: int, **options) -> Grads:
    """Forward and backward of one rank, whose tokens are the next `counts[rank]` of the problem."""
    first = sum(counts[:rank])
    mine, experts = slice(first, first + counts[rank]), share_of_experts(of, ranks.size, rank)
    x, w13, w2, weights = leaves(of.x[mine], of.w13[experts], of.w2[experts], of.weights[mine])
    bias = biases(of, experts)
    y = ranks.call(rank, x, w13, w2, weights, of.ids[mine], of.recipe, **bias, **options)
    y.backward(of.dy[mine])
    return Grads(y.detach(), x.grad, weights.grad, w13.grad, w2.grad, *(tensor.grad for tensor in bias.values()))
