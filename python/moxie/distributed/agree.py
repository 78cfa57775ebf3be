"""Checks that all ranks of a group make together: if one rank refuses something, all raise, so that none waits for the others."""

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist


def agree(op: str, group: dist.ProcessGroup | None, describe: Callable[[], Mapping[str, Any]]) -> None:
    """Calls `describe` on every rank, which returns what must be the same on all ranks, or raises. Raises on all ranks if one
    raised or two differ."""
    mine: Mapping[str, Any] | str
    error: Exception | None = None
    try:
        mine = {name: str(value) for name, value in describe().items()}
    except Exception as caught:  # of any type, because the other ranks wait for an answer in any case
        error, mine = caught, str(caught) or type(caught).__name__
    all_of_them: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(all_of_them, mine, group=group)
    if error is not None:
        raise error
    for rank, other in enumerate(all_of_them):
        if isinstance(other, str):
            raise ValueError(f"{op}: rank {rank} of the group refuses: {other}")
    first = all_of_them[0]
    for rank, other in enumerate(all_of_them):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"{op}: ranks must agree on {name}, got {first.get(name, 'nothing')} on rank 0 and "
                    f"{other.get(name, 'nothing')} on rank {rank} of the group"
                )
