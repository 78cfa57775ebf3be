"""Tensor parallelism of experts, as a style for torch's `parallelize_module`.

`MXLinear` takes torch's own ColwiseParallel, RowwiseParallel and SequenceParallel. Experts hold gates and ups in one parameter,
which no style of torch shards: `ExpertTensorParallel` does.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from moxie.distributed.agree import agree
from moxie.distributed.placement import check_shards, gate_up_shard
from moxie.nn import GroupedExperts

_OP = "ExpertTensorParallel"


class ExpertTensorParallel(ParallelStyle):
    """Shards the hidden features of all `moxie.nn.GroupedExperts` in a module: an MoE, a SharedExperts or experts alone.

    Each rank has hidden_dim / ranks features of every expert, and its part of each row's result; their sum is one all-reduce in
    forward and one in backward, or a reduce-scatter in forward if `output_layouts` is a Shard. The router is whole on every rank.
    `input_layouts` says how a plain x is spread over the ranks: Replicate(), or Shard(dim) of a sequence that is gathered first.

    >>> style = moxie.distributed.ExpertTensorParallel()
    >>> model = torch.distributed.tensor.parallel.parallelize_module(model, mesh, {"moe": style})  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ):
        super().__init__()
        for name, layout in (("input_layouts", input_layouts), ("output_layouts", output_layouts)):
            if layout is not None and not isinstance(layout, (Replicate, Shard)):
                raise ValueError(f"{_OP}: {name} must be Replicate() or Shard(dim), got {layout!r}")
        self.input_layouts = input_layouts or Replicate()
        self.output_layouts = output_layouts or Replicate()
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        experts = [one for one in module.modules() if isinstance(one, GroupedExperts)]
        agree(_OP, device_mesh.get_group(), lambda: _described(module, experts, device_mesh))
        for one in experts:
            shard_experts_(one, device_mesh)
        module.register_forward_pre_hook(lambda _, args, kwargs: self._take(device_mesh, args, kwargs), with_kwargs=True)
        module.register_forward_hook(lambda _, args, y: self._give(y))
        return module

    def _take(self, mesh: DeviceMesh, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Replaces x by the whole of it, as a plain tensor. Its gradient is whole on every rank, because the products have added
        it up."""
        x: Tensor = args[0] if args else kwargs["x"]
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [self.input_layouts], run_check=False)
        elif x.device_mesh != mesh:
            raise ValueError(f"{_OP}: x must be on the mesh of the experts, {mesh}, got {x.device_mesh}")
        x = x.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Replicate()])
        return ((x, *args[1:]), kwargs) if args else ((), {**kwargs, "x": x})

    def _give(self, y: Tensor) -> Tensor:
        assert isinstance(y, DTensor)
        y = y.redistribute(placements=[self.output_layouts])
        return y.to_local() if self.use_local_output else y


def _described(module: nn.Module, experts: list[GroupedExperts], mesh: DeviceMesh) -> dict[str, object]:
    if not experts:
        raise ValueError(f"{_OP}: the module must hold a GroupedExperts, got {type(module).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"{_OP}: the mesh must have one dim, such as mesh['tp'], got {mesh.ndim}")
    found: dict[str, object] = {}
    for i, one in enumerate(experts):
        for name in ("w13", "w2"):
            weight = getattr(one, name)
            if isinstance(weight, DTensor):
                raise ValueError(
                    f"{_OP}: {name} is sharded already, by {list(weight.placements)}; tensor parallelism comes first, "
                    "fully_shard after it, and each once"
                )
            found[f"the shape of {name} of experts {i}"] = tuple(weight.shape)
            found[f"the dtype of {name} of experts {i}"] = weight.dtype
        found[f"the place of experts {i} in their ep_group"] = getattr(getattr(one, "member", None), "rank", None)
        if one.cache13 is not None:
            raise ValueError(
                f"{_OP}: a weight cache holds whole weights, and these are about to be sharded; turn weight_cache off"
            )
        if one.transposed or one.w13_layout != "concatenated" or one.b13 is not None or one.main_grad:
            raise ValueError(
                f"{_OP}: experts must be [out, in], concatenated, without bias and main_grad, got transposed {one.transposed}, "
                f"w13_layout {one.w13_layout}, bias {one.b13 is not None}, main_grad {one.main_grad}"
            )
        if one.collect_stats:
            raise ValueError(f"{_OP}: collect_stats is for whole weights, and these are about to be sharded; turn it off")
        check_shards(_OP, "w2", one.w2.shape[2], mesh, 0, one.recipe, "columns")
        found[f"the recipe of experts {i}"] = one.recipe
    return found


@torch.no_grad()
def shard_experts_(experts: GroupedExperts, mesh: DeviceMesh) -> None:
    """Replaces the weights by DTensors that hold this rank's hidden features. Rank 0 of the mesh gives the values."""
    for name, placement in (("w13", gate_up_shard()), ("w2", Shard(2))):
        weight = getattr(experts, name)
        # torch cannot scatter to a strided placement, so every rank gets rank 0's whole values and cuts out its own.
        whole = distribute_tensor(weight.detach(), mesh, [Replicate()])
        try:
            sharded = whole.redistribute(mesh, [placement])
        except ValueError as error:
            raise RuntimeError(
                f"{_OP}: torch {torch.__version__} cannot redistribute a DTensor to the placement of w13, gate_up_shard(); "
                "torch 2.13 can"
            ) from error
        experts.register_parameter(name, nn.Parameter(sharded, requires_grad=weight.requires_grad))
