"""How the products place their operands on a device mesh, and what they refuse.

Each dim of a mesh holds the weights in one of four ways, `Split`. It decides where x must be and where results and gradients are:

    split     w [G, N, K]   x           y           dx          dw
    none      Replicate     as it is    as x        as x        Replicate, Partial if x is sharded
    experts   Shard(0)      Replicate   Partial     Partial     Shard(0)
    out       Shard(1)      Replicate   Shard(1)    Partial     Shard(1)
    in        Shard(2)      Shard(1)    Partial     Shard(1)    Shard(2)
"""

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from moxie.recipe import Recipe

Split = Literal["none", "experts", "out", "in"]
Placements = Sequence[Placement]

_SPLITS: tuple[Split, ...] = ("experts", "out", "in")


def gate_up_shard() -> Placement:
    """The placement of w13 [E, 2F, D] that gives each rank its share of the gates and the same share of the ups.

    Shard(1) would give the first ranks gates alone.
    """
    return cast(Placement, _StridedShard(1, split_factor=2))


def is_gate_up_shard(placement: Placement) -> bool:
    if not isinstance(placement, _StridedShard) or placement.dim != 1:
        return False
    return torch.compiler.is_compiling() or placement.split_factor == 2  # Dynamo cannot read it


def mesh_of(op: str, **tensors: Tensor | None) -> DeviceMesh:
    """Returns the mesh of the DTensors among the arguments. Raises if they are on different meshes."""
    first: tuple[str, DeviceMesh] | None = None
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            continue
        if first is None:
            first = (name, tensor.device_mesh)
        elif first[1] != tensor.device_mesh:
            raise ValueError(
                f"{op}: DTensors must be on one mesh, got {first[0]} on {_mesh_text(first[1])} and {name} on "
                f"{_mesh_text(tensor.device_mesh)}"
            )
    assert first is not None
    return first[1]


def _mesh_text(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or tuple(f"dim {i}" for i in range(mesh.ndim))
    return "(" + ", ".join(f"{name}: {size}" for name, size in zip(names, mesh.shape)) + ")"


def dim_name(mesh: DeviceMesh, dim: int) -> str:
    return mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else f"dim {dim}"


def placements_of(tensor: Tensor, mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Returns the placements of a DTensor. A plain tensor counts as replicated: the same on every rank."""
    return tensor.placements if isinstance(tensor, DTensor) else (Replicate(),) * mesh.ndim


def split_of(op: str, name: str, placement: Placement, dims: int = 3) -> Split:
    """Returns what a placement of weights [G, N, K] (of [N, K] if `dims` is 2) means for the product."""
    if isinstance(placement, Replicate):
        return "none"
    if isinstance(placement, Shard) and not isinstance(placement, _StridedShard):
        return _SPLITS[placement.dim % dims + 3 - dims]
    hint = "; redistribute it first" if isinstance(placement, Partial) else ""
    raise ValueError(f"{op}: {name} must be replicated or sharded over one of its dims, got {placement}{hint}")


@torch.compiler.assume_constant_result
def block_of(recipe: str) -> int:
    """Returns how many elements along a sharded dim share a scale, at most, in any pass; 1 if none do."""
    if recipe.partition(":")[0] == "identity":
        return 1
    parsed = Recipe.from_name(recipe)
    if parsed.scaling != "block":
        return 1
    columns = [int(block.split("x")[1]) for block in (parsed.activations, parsed.wgrad_dy, parsed.wgrad_x)]
    return max(*columns, *(int(side) for side in parsed.weights.split("x")))


def check_shards(op: str, name: str, size: int, mesh: DeviceMesh, dim: int, recipe: str, what: str) -> None:
    """Raises if a dim of `size` elements cannot be sharded over a mesh dim without cutting a block, or into equal shards."""
    ranks, block = mesh.size(dim), block_of(recipe)
    if ranks == 1:
        return
    if size % ranks:
        raise ValueError(
            f"{op}: the {size} {what} of {name} must divide among the {ranks} ranks of {dim_name(mesh, dim)!r}, and leave "
            f"{size % ranks} over"
        )
    if (size // ranks) % block:
        raise ValueError(
            f"{op}: a shard of {name} must be a multiple of the recipe's blocks of {block}, got {size // ranks} {what}: "
            f"{size} over the {ranks} ranks of {dim_name(mesh, dim)!r}; a block that two ranks share would have two scales"
        )
