"""The `extra` of a checkpoint as one tensor of bytes. Loading it runs no code: torch's unpickler takes known types alone."""

import io
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree


def packed(op: str, extra: dict[str, Any] | None) -> Tensor:
    """uint8 [bytes]. Refuses what `unpacked` could not give back."""
    if any(isinstance(leaf, DTensor) for leaf in _pytree.tree_leaves(extra)):
        raise ValueError(f"{op}: extra must hold no DTensor, of which one rank has a part alone, got one")
    file = io.BytesIO()
    try:
        torch.save(extra or {}, file)
        data = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        unpacked(data)
    except Exception as error:  # pickle has no error type of its own for all that it refuses
        raise ValueError(f"{op}: extra must hold what torch.load(weights_only=True) takes, got {error}") from error
    return data


def unpacked(data: Tensor) -> dict[str, Any]:
    return torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True, map_location="cpu")
