"""Products on DTensors: each rank multiplies its shards, and DTensor joins the results or adds them up.

The ops have no sharding rules. DTensor would ask for them below autograd, for every op of forward and backward; here the whole
product, with its backward, runs on local tensors, and the placements of operands and gradients follow from that of the weights.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from moxie import gemm, moe
from moxie.distributed.placement import (
    Placements,
    check_shards,
    dim_name,
    is_gate_up_shard,
    mesh_of,
    placements_of,
    split_of,
)


def to_local(tensor: Tensor, mesh: DeviceMesh, wanted: Placements, grads: Placements) -> Tensor:
    """Returns this rank's part of the tensor, placed as `wanted`. In backward, its gradient is taken to be placed as `grads`."""
    if not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    if tuple(tensor.placements) != tuple(wanted):
        if isinstance(tensor._local_tensor, gemm.MX_TYPES):
            raise ValueError(
                f"grouped_mm: an MXTensor cannot be moved from {list(tensor.placements)} to {list(wanted)}; place it so before "
                "it is quantized"
            )
        tensor = tensor.redistribute(mesh, wanted)
    local = tensor.to_local(grad_placements=list(grads))
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def as_dtensor(local: Tensor, mesh: DeviceMesh, placements: Placements, *shape: int) -> DTensor:
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(local, mesh, list(placements), run_check=False, shape=torch.Size(shape), stride=strides)


def _refuse(op: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{op}: {name} must be None where weights are DTensors, got {type(value).__name__}")


def _whole(op: str, name: str, tensor: Tensor | None) -> Tensor | None:
    """Returns indices, such as offs, as a local tensor. Raises if they are sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not all(isinstance(placement, Replicate) for placement in tensor.placements):
        raise ValueError(f"{op}: {name} must be replicated, got {list(tensor.placements)}")
    return tensor.to_local()


class _ExpertRows:
    """Finds this rank's rows among those of all experts, if experts are sharded. Nothing waits for offs."""

    def __init__(self, offs: Tensor, first: int, count: int):
        self.start = offs[first - 1].long() if first else torch.zeros((), dtype=torch.long, device=offs.device)
        self.offs = (offs[first : first + count] - self.start).to(torch.int32)

    def _roll(self, rows: Tensor, shift: Tensor) -> Tensor:
        if rows.shape[0] == 0:
            return rows
        order = (torch.arange(rows.shape[0], device=rows.device) + shift) % rows.shape[0]
        return rows.index_select(0, order)

    def take(self, rows: Tensor) -> Tensor:
        """Rotates the rows so that this rank's come first. The others, past the last end of `offs`, are then in no group."""
        return self._roll(rows, self.start)

    def put_back(self, rows: Tensor) -> Tensor:
        return self._roll(rows, -self.start)


def _expert_rows(op: str, w: Tensor, mesh: DeviceMesh, dims: list[int], offs: Tensor | None) -> _ExpertRows:
    if len(dims) > 1:
        names = " and ".join(repr(dim_name(mesh, dim)) for dim in dims)
        raise ValueError(f"{op}: experts may be sharded over one dim of the mesh, got {names}")
    check_shards(op, "w", w.shape[0], mesh, dims[0], "bf16", "experts")
    if offs is None:
        raise ValueError(f"{op}: offs must be given where experts are sharded, got None")
    count = w.shape[0] // mesh.size(dims[0])
    return _ExpertRows(offs, mesh.get_local_rank(dims[0]) * count, count)


def grouped_mm(
    x: Tensor,
    w: Tensor,
    offs: Tensor | None,
    *,
    recipe: str,
    bias: Tensor | None,
    dtype: torch.dtype | None,
    quantized_w: object,
    main_grad: Tensor | None,
) -> Tensor:
    op = "grouped_mm"
    _refuse(op, quantized_w=quantized_w, main_grad=main_grad)
    mesh = mesh_of(op, x=x, w=w, bias=bias, offs=offs)
    offs = _whole(op, "offs", offs)
    given = placements_of(x, mesh)
    to: dict[str, list[Placement]] = {name: [] for name in ("x", "y", "dx", "w", "dw", "bias", "dbias")}
    add_bias, expert_dims = True, []
    row: tuple[Placement, ...]  # the placements of x, y, dx, w, dw
    of_bias: tuple[Placement, ...]
    for dim, placement in enumerate(placements_of(w, mesh)):
        split = split_of(op, "w", placement)
        # Whether x is sharded by rows, as in sequence parallelism.
        on_rows = isinstance(given[dim], Shard) and given[dim].is_shard(0)
        joins_rows = on_rows and (split != "none" or offs is not None or w.shape[0] > 1)
        if split == "none":
            as_x = Shard(0) if on_rows and not joins_rows else Replicate()
            row = (as_x, as_x, as_x, Replicate(), Partial() if on_rows and not joins_rows else Replicate())
            of_bias = (Replicate(), row[4])
        elif split == "out":
            check_shards(op, "w", w.shape[1], mesh, dim, recipe, "rows")
            row = (Replicate(), Shard(1), Partial(), Shard(1), Shard(1))
            of_bias = (Shard(-1 if bias is None else bias.dim() - 1),) * 2
        elif split == "in":
            check_shards(op, "w", w.shape[2], mesh, dim, recipe, "columns")
            row = (Shard(1), Partial(), Shard(1), Shard(2), Shard(2))
            of_bias = (Replicate(), Partial())
            # Results are added up over the ranks, and the bias must be added once.
            add_bias = add_bias and mesh.get_local_rank(dim) == 0
        else:
            expert_dims.append(dim)
            row = (Replicate(), Partial(), Partial(), Shard(0), Shard(0))
            of_bias = (Shard(0), Shard(0)) if bias is not None and bias.dim() == 2 else (Replicate(), Partial())
        for name, one in zip(to, (*row, *of_bias)):
            to[name].append(one)
    local_x, local_w = to_local(x, mesh, to["x"], to["dx"]), to_local(w, mesh, to["w"], to["dw"])
    local_bias = None
    if bias is not None:
        local_bias = to_local(bias, mesh, to["bias"], to["dbias"])
        local_bias = local_bias if add_bias else local_bias * 0  # times 0, so that the bias has a gradient on every rank
    if expert_dims:
        rows = _expert_rows(op, w, mesh, expert_dims, offs)
        y = rows.put_back(gemm.grouped_mm(rows.take(local_x), local_w, rows.offs, recipe=recipe, bias=local_bias, dtype=dtype))
    else:
        y = gemm.grouped_mm(local_x, local_w, offs, recipe=recipe, bias=local_bias, dtype=dtype)
    return as_dtensor(y, mesh, to["y"], x.shape[0], w.shape[1])


def linear(x: Tensor, w: Tensor, bias: Tensor | None, *, recipe: str) -> Tensor:
    """Computes MXLinear's product for DTensors x [.., K] and w [N, K]. If w is replicated, x may be sharded over any of its
    leading dims."""
    op, last = "MXLinear", x.dim() - 1
    mesh = mesh_of(op, x=x, weight=w, bias=bias)
    given = placements_of(x, mesh)
    to: dict[str, list[Placement]] = {name: [] for name in ("x", "y", "dx", "w", "dw", "bias", "dbias")}
    add_bias = True
    row: tuple[Placement, ...]  # the placements, in the order of `to`
    for dim, placement in enumerate(placements_of(w, mesh)):
        split = split_of(op, "weight", placement, dims=2)
        if split == "out":
            check_shards(op, "weight", w.shape[0], mesh, dim, recipe, "rows")
            row = (Replicate(), Shard(last), Partial(), Shard(0), Shard(0), Shard(0), Shard(0))
        elif split == "in":
            check_shards(op, "weight", w.shape[1], mesh, dim, recipe, "columns")
            row = (Shard(last), Partial(), Shard(last), Shard(1), Shard(1), Replicate(), Partial())
            # Results are added up over the ranks, and the bias must be added once.
            add_bias = add_bias and mesh.get_local_rank(dim) == 0
        elif isinstance(given[dim], Shard) and not given[dim].is_shard(last):
            row = (given[dim], given[dim], given[dim], Replicate(), Partial(), Replicate(), Partial())
        else:
            row = (Replicate(),) * 7
        for name, one in zip(to, row):
            to[name].append(one)
    local_x, local_w = to_local(x, mesh, to["x"], to["dx"]), to_local(w, mesh, to["w"], to["dw"])
    local_bias = None if bias is None else to_local(bias, mesh, to["bias"], to["dbias"])
    if local_bias is not None and not add_bias:
        local_bias = local_bias * 0  # times 0, so that the bias has a gradient on every rank
    y = gemm.grouped_mm(local_x.reshape(-1, local_x.shape[-1]), local_w.unsqueeze(0), recipe=recipe, bias=local_bias)
    return as_dtensor(y.reshape(*local_x.shape[:-1], y.shape[-1]), mesh, to["y"], *x.shape[:-1], w.shape[0])


def _expert_placements(op: str, w13: Tensor, w2: Tensor, mesh: DeviceMesh, recipe: str) -> tuple[list[Placement], list[int]]:
    """Returns the placements of y and of the gradients of x and of the routing weights (they are the same), and the mesh dims
    over which experts are sharded."""
    summed: list[Placement] = []
    expert_dims: list[int] = []
    for dim, (one, two) in enumerate(zip(placements_of(w13, mesh), placements_of(w2, mesh))):
        if is_gate_up_shard(one) and split_of(op, "w2", two) == "in":
            check_shards(op, "w2", w2.shape[2], mesh, dim, recipe, "columns")
            summed.append(Partial())
        elif isinstance(one, Shard) and one.is_shard(1) and not is_gate_up_shard(one):
            raise ValueError(
                f"{op}: w13 holds the gates above the ups, and Shard(1) over {dim_name(mesh, dim)!r} would part them; place it "
                "with moxie.distributed.gate_up_shard(), or let ExpertTensorParallel shard the module"
            )
        elif (split := split_of(op, "w13", one)) == split_of(op, "w2", two) and split in ("none", "experts"):
            expert_dims += [dim] if split == "experts" else []
            summed.append(Partial() if split == "experts" else Replicate())
        else:
            raise ValueError(
                f"{op}: over {dim_name(mesh, dim)!r} w13 and w2 must be sharded by gate_up_shard() and Shard(2), or both by "
                f"Shard(0), or neither, got {one} and {two}"
            )
    return summed, expert_dims


def expert_mlp(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    offs: Tensor | None,
    *,
    recipe: str,
    slot_of: Tensor | None,
    row_of: Tensor | None,
    top_k: int,
    weights: Tensor | None,
    unsupported: dict[str, Any],
    **options: Any,
) -> Tensor:
    """Computes moxie.expert_mlp with weights that are DTensors. `options` are passed on; all in `unsupported` must be None."""
    op = "expert_mlp"
    _refuse(op, **unsupported)
    mesh = mesh_of(op, x=x, w13=w13, w2=w2, offs=offs, slot_of=slot_of, row_of=row_of, weights=weights)
    offs, slot_of, row_of = (_whole(op, name, t) for name, t in (("offs", offs), ("slot_of", slot_of), ("row_of", row_of)))
    summed, expert_dims = _expert_placements(op, w13, w2, mesh, recipe)
    everywhere = [Replicate()] * mesh.ndim
    local_x = to_local(x, mesh, everywhere, summed)
    local13, local2 = (
        to_local(w, mesh, w_at, w_at) for w, w_at in ((w13, placements_of(w13, mesh)), (w2, placements_of(w2, mesh)))
    )
    local_weights = None if weights is None else to_local(weights, mesh, everywhere, summed)
    if expert_dims:
        rows = _expert_rows(op, w13, mesh, expert_dims, offs)
        taken = local_x if slot_of is None or row_of is None else moe.permute(local_x, slot_of, row_of, top_k)
        y = rows.put_back(gemm.expert_mlp(rows.take(taken), local13, local2, rows.offs, recipe=recipe, **options))
        if local_weights is not None and slot_of is not None and row_of is not None:
            y = moe.unpermute(y, slot_of, row_of, local_x.shape[0], weights=local_weights)
    else:
        route: dict[str, Any] = {"slot_of": slot_of, "row_of": row_of, "top_k": top_k, "weights": local_weights}
        y = gemm.expert_mlp(local_x, local13, local2, offs, recipe=recipe, **route, **options)
    return as_dtensor(y, mesh, summed, y.shape[0], w2.shape[1])


def expert_mlp_over_group(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    weights: Tensor,
    *,
    recipe: str,
    exchange: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Runs experts of an `ep_group` whose hidden features are sharded. `exchange` gets x, w13, w2 and weights of this rank."""
    op = "ParallelExperts"
    mesh = mesh_of(op, w13=w13, w2=w2)
    summed, expert_dims = _expert_placements(op, w13, w2, mesh, recipe)
    if expert_dims:
        raise ValueError(f"{op}: the ep_group shards experts already, and {dim_name(mesh, expert_dims[0])!r} must not again")
    everywhere = [Replicate()] * mesh.ndim
    local_x, local_weights = (to_local(one, mesh, everywhere, summed) for one in (x, weights))
    local13, local2 = (to_local(w, mesh, at, at) for w, at in ((w, placements_of(w, mesh)) for w in (w13, w2)))
    y = exchange(local_x, local13, local2, local_weights)
    return as_dtensor(y, mesh, summed, *y.shape)


def on_whole_tokens(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Calls the layer with a DTensor x: every rank routes all tokens, and experts that are DTensors split the work."""
    assert isinstance(x, DTensor)
    mesh, everywhere = x.device_mesh, [Replicate()] * x.device_mesh.ndim
    y = layer(to_local(x, mesh, everywhere, everywhere))
    return y if isinstance(y, DTensor) else DTensor.from_local(y, mesh, everywhere, run_check=False)
