"""Describes to DCP (torch.distributed.checkpoint) tensors that it cannot place itself: shards that are several runs of rows, and
the experts of a group, which are plain tensors on each rank."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from moxie.distributed.placement import is_gate_up_shard
from moxie.nn import GroupedExperts


class Chunks(Tensor):
    """A tensor of which this rank holds parts: views of local memory, each with its offset in the whole. DCP calls only its three
    methods."""

    parts: dict[torch.Size, Tensor]

    @staticmethod
    def __new__(cls, shape: torch.Size, parts: list[tuple[tuple[int, ...], Tensor]]):
        one = parts[0][1]
        return Tensor._make_wrapper_subclass(cls, shape, dtype=one.dtype, device=one.device)

    def __init__(self, shape: torch.Size, parts: list[tuple[tuple[int, ...], Tensor]]):
        self.parts = {torch.Size(offset): part for offset, part in parts if part.numel()}

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        raise NotImplementedError(f"Chunks: {func} is not defined on the chunks of a checkpoint")

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offset, sizes=part.size()),
                    properties=TensorProperties.create_from_tensor(part),
                    size=self.size(),
                ),
            )
            for offset, part in self.parts.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=offset, sizes=part.size()) for offset, part in self.parts.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.parts[torch.Size(index.offset)]


def _members(op: str, model: nn.Module, names: Iterable[str]) -> dict[str, Any]:
    """Maps the names, in the state dict, of the weights of experts of a group to this rank's place in the group. Raises if the
    state dict lacks one: DCP would save it as if every rank had the same experts."""
    members = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, GroupedExperts) and getattr(module, "member", None) is not None:
            for weight in ("w13", "w2") if module.b13 is None else ("w13", "w2", "b13", "b2"):
                # The names that get_model_state_dict gives: without the prefixes of DDP, torch.compile and checkpoint_wrapper.
                members.update(dict.fromkeys(_get_fqns(model, f"{name}.{weight}".lstrip(".")), module.member))
    if missed := sorted(members.keys() - set(names)):
        raise ValueError(f"{op}: the state dict must hold all experts of a group, got none named {', '.join(missed)}")
    return members


def whole_experts(op: str, model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Returns the state dicts of model and optimizer, with Chunks in place of tensors that DCP cannot place. They share memory
    with those."""
    members = _members(op, model, state["model"])

    def placed(name: str, value: Any) -> Any:
        # Only weights of experts (three dims) can need Chunks, and their biases (two dims) if a group splits the experts.
        if not isinstance(value, Tensor) or not (value.dim() == 3 or (value.dim() == 2 and name in members)):
            return value
        return _chunks_of(value, members.get(name))

    out = {**state, "model": {name: placed(name, value) for name, value in state["model"].items()}}
    if "optimizer" in state:
        moments = {
            name: {kind: placed(name, value) for kind, value in of_one.items()}
            for name, of_one in state["optimizer"]["state"].items()
        }
        out["optimizer"] = {**state["optimizer"], "state": moments}
    return out


def _chunks_of(value: Tensor, member: Any) -> Any:
    """Returns Chunks for a tensor that DCP cannot place, any other tensor as it is. `member` is this rank's place in the group
    that splits the experts, or None."""
    strided = [dim for dim, one in enumerate(value.placements) if is_gate_up_shard(one)] if isinstance(value, DTensor) else []
    if not strided and member is None:
        return value
    local: Tensor = value
    shape, offset = list(value.shape), [0] * value.dim()
    if isinstance(value, DTensor):
        local = value._local_tensor
        plain = [Replicate() if dim in strided else one for dim, one in enumerate(value.placements)]
        offset = list(compute_local_shape_and_global_offset(value.shape, value.device_mesh, plain)[1])
    if member is not None:
        offset[0] += member.rank * value.shape[0]
        shape[0] *= member.size
    if not strided:
        return Chunks(torch.Size(shape), [(tuple(offset), local)])
    assert isinstance(value, DTensor)
    hidden, rank = shape[1] // 2, value.device_mesh.get_local_rank(strided[0])
    share = hidden // value.device_mesh.size(strided[0])
    places = (rank * share, hidden + rank * share)  # the first rows of its gates and of its ups
    halves = (local[:, :share], local[:, share:])
    return Chunks(torch.Size(shape), [((offset[0], place, offset[2]), half) for place, half in zip(places, halves)])
