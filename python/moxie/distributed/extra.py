"""Packs the `extra` of a checkpoint into one tensor of bytes. Loading it runs no code, because torch's unpickler takes known
types only."""

import io
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree


def packed(op: str, extra: dict[str, Any] | None) -> Tensor:
    """Returns `extra` as uint8 [bytes]. Raises if `unpacked` could not restore it."""
    if any(isinstance(leaf, DTensor) for leaf in _pytree.tree_leaves(extra)):
        raise ValueError(f"{op}: extra must hold no DTensor, of which one rank has a part alone, got one")
    file = io.BytesIO()
    try:
        torch.save(extra or {}, file)
        data = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        unpacked(data)
    except Exception as error:  # pickle raises errors of many types for values that it refuses
        raise ValueError(f"{op}: extra must hold what torch.load(weights_only=True) takes, got {error}") from error
    return data


def unpacked(data: Tensor) -> dict[str, Any]:
    return torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True, map_location="cpu")
