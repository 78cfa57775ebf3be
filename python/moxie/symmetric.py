"""Memory that the ranks of a group share, for the symmetric engine of expert parallelism (docs/EXPERT_PARALLEL.md).

torch's symmetric memory makes it, in the first forward of a layer, on all ranks together. Layers of a group use the same memory
where it is large enough: they exchange one after the other, on one stream.
"""

import dataclasses
import uuid
import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moxie.distributed.agree import agree

_ops = torch.ops.moxie

MOST_SECONDS = 10**9  # of a timeout, whose nanoseconds must fit int64
TIMES_EVEN_SHARE = 2  # the default of max_rows: twice the rows that a rank's experts get where all experts get as many


@dataclasses.dataclass(frozen=True)
class Symmetric:
    """The symmetric engine, with settings. Results of a call that needs more than these are NaN, and the next call raises.

    `max_rows`: of a rank's experts in one call; by default twice the even share of the first call, or what one rank can need.
    `max_tokens`: of a rank in one call; by default those of the first call, the largest number of any rank. `timeout`: seconds
    that a GPU waits for the other ranks.
    """

    max_rows: int | None = None
    max_tokens: int | None = None
    timeout: float = 600.0

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"MoE: {name} of engine symmetric must be 1 or more, got {value}")
        if not 0 < self.timeout <= MOST_SECONDS:
            raise ValueError(
                f"MoE: timeout of engine symmetric must be more than 0 and at most {MOST_SECONDS} s, got {self.timeout}"
            )

    @property
    def timeout_ms(self) -> int:
        return max(1, round(self.timeout * 1000))


class Sizes(NamedTuple):
    """What decides how much memory a layer needs; equal on all ranks."""

    ranks: int
    experts: int  # of all ranks
    dim: int
    top_k: int
    recipe: str
    wire: str
    dtype: torch.dtype
    bias: bool


def limits_of(engine: Symmetric, sizes: Sizes, tokens: int) -> tuple[int, int]:
    """Rows of a rank's experts and tokens that a rank receives, at most, where no rank has more than so many tokens."""
    tokens = engine.max_tokens or tokens
    local = sizes.experts // sizes.ranks
    most = sizes.ranks * tokens * min(sizes.top_k, local)  # whatever the routing
    rows = engine.max_rows or min(most, TIMES_EVEN_SHARE * tokens * sizes.top_k)
    rows = max(rows, local)  # after a failure every expert gets a row of NaN
    return rows, min(rows, sizes.ranks * tokens)


class Shared:
    """One rank's shared memory, its status and the addresses of its peers'."""

    def __init__(self, group: Any, name: str, memory: Tensor, peers: list[int], capacity: list[int]):
        self.group = group  # the one it was made with: a later group may have the same name
        self.name = name  # random, the same on all ranks
        self.memory, self.peers, self.capacity = memory, peers, capacity
        self.status = torch.zeros(5, dtype=torch.int64, pin_memory=memory.is_cuda)
        self.handle: Any = None  # of torch, which keeps the peers' memory mapped

    def holds(self, capacity: list[int]) -> bool:
        return self.capacity[0] == capacity[0] and all(have >= need for have, need in zip(self.capacity, capacity, strict=True))


_made: "weakref.WeakValueDictionary[tuple[str, torch.device], Shared]" = weakref.WeakValueDictionary()


@dataclasses.dataclass
class Place:
    """A layer's place in shared memory."""

    sizes: Sizes
    shared: Shared
    limits: tuple[int, int]
    tokens: int  # of a rank, that it was made for

    def holds(self, sizes: Sizes) -> bool:
        """Whether a layer whose recipe, wire or dtype has changed has room in the same place."""
        same_rows = (sizes.experts, sizes.top_k) == (self.sizes.experts, self.sizes.top_k)
        return same_rows and self.shared.holds(capacity_of(sizes, self.limits))


def capacity_of(sizes: Sizes, limits: tuple[int, int]) -> list[int]:
    ranks, experts, dim, _, recipe, wire, dtype, bias = sizes
    return list(_ops._exchange_capacity(ranks, experts, dim, list(limits), dtype, recipe=recipe, wire=wire, bias=bias))


def place_of(member: Any, engine: Symmetric, sizes: Sizes, x: Tensor) -> Place:
    """Makes room for a layer, or finds it. Every rank calls it; where one raises, all do."""

    def describe() -> dict[str, Any]:
        _check_device(x)
        return {"engine": engine, **sizes._asdict()}

    group = member.group
    agree(f"MoE over group '{member.name}'", group, describe)
    key = (member.name, x.device)
    shared = _made.get(key)
    if shared is not None and (shared.group is not group or int(shared.status[0]) != 0):
        shared = None
    # Memory is used again where every rank still has it: a rank may have freed its layers before the others.
    of_ranks: list[Any] = [None] * member.size
    dist.all_gather_object(of_ranks, (x.shape[0], None if shared is None else shared.name), group=group)
    if any(name is None or name != of_ranks[0][1] for _, name in of_ranks):
        shared = None
    tokens = max(tokens for tokens, _ in of_ranks)
    limits = limits_of(engine, sizes, tokens)
    capacity = capacity_of(sizes, limits)
    if shared is None or not shared.holds(capacity):
        if shared is not None and shared.capacity[0] == capacity[0]:
            capacity = [max(pair) for pair in zip(shared.capacity, capacity, strict=True)]
        shared = _make(member, group, capacity, x.device)
        _made[key] = shared
    return Place(sizes, shared, limits, tokens)


def _check_device(x: Tensor) -> None:
    if not x.is_cuda:
        raise ValueError(f"MoE: engine symmetric takes CUDA tensors, got x on {x.device}; the engine c10d takes both")
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "MoE: engine symmetric makes its memory in the first forward, which no CUDA graph can hold; run one first"
        )


def _make(member: Any, group: Any, capacity: list[int], device: torch.device) -> Shared:
    from torch._C._distributed_c10d import _SymmetricMemory
    from torch.distributed import _symmetric_memory as symmetric_memory

    size = _ops._exchange_bytes(member.size, capacity)
    memory: Tensor | None = None
    failure, failures = "", [""] * member.size
    try:
        memory = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)
    except RuntimeError as error:
        failure = str(error)
    dist.all_gather_object(failures, failure, group=group)  # all or none go on to meet below
    for rank, failure in enumerate(failures):
        if failure:
            raise RuntimeError(f"MoE: rank {rank} of group '{member.name}' has no {size} bytes to share: {failure}")
    assert memory is not None
    handle = symmetric_memory.rendezvous(memory, group)
    memory.zero_()
    torch.cuda.synchronize(device)
    names = [""] * member.size
    dist.all_gather_object(names, uuid.uuid4().hex, group=group)  # behind it, all ranks have cleared their memory
    peers = [handle.get_buffer(rank, (size,), torch.uint8).data_ptr() for rank in range(member.size)]
    peers[member.rank] = memory.data_ptr()
    shared = Shared(group, names[0], memory, peers, capacity)
    shared.handle = handle
    return shared
