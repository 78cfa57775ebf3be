"""Cases that test_distributed.py runs on every rank: checkpoints that are saved on one mesh and loaded on another, of another
size or shape."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import moxie
import moxie.distributed
import moxie.nn
from moxie.distributed import checkpoint
from ranks import World
from sharded_models import D, E, Model, mesh_of, shard, tokens, whole


def trained(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dtype = torch.bfloat16 if isinstance(model, FSDPModule) else torch.float32  # FSDP2 computes in bf16
    model(tokens(rank, dtype)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = {name: whole(tensor).clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        state |= {f"{name} {kind}": whole(value).clone() for kind, value in optimizer.state[parameter].items()}
    return state


def assert_same(got: dict, wanted: dict) -> None:
    assert got.keys() == wanted.keys(), got.keys() ^ wanted.keys()
    for name in wanted:
        assert torch.equal(got[name], wanted[name]), name


def blank(**options) -> Model:
    torch.manual_seed(99)
    return Model(hidden=256, **options)


def checkpoints_move_between_world_sizes_and_meshes(world: World) -> None:
    size, folder = world.size, world.folder / "checkpoints"
    torch.manual_seed(6)
    grid = mesh_of(size // 2, 2, names=("dp", "tp"))
    smaller = DeviceMesh("cpu", torch.arange(size // 2), mesh_dim_names=("dp",))  # half of the ranks
    one = DeviceMesh("cpu", torch.arange(1), mesh_dim_names=("dp",))
    model = Model(hidden=256)
    parallelize_module(model, grid["tp"], {"moe": moxie.distributed.ExpertTensorParallel()})
    shard(model, grid["dp"], within=(moxie.nn.GroupedExperts,))
    optimizer = trained(model, grid["dp"].get_local_rank())
    wanted = state_of(model, optimizer)
    checkpoint.save(folder, 4, model, optimizer, extra={"tokens": 77, "seed": "a"})
    # Half of the ranks load the checkpoint with another sharding, then a single rank loads it whole. Each time they save it under
    # a new step, and all ranks load that.
    for step, mesh in ((2, smaller), (1, one)):
        other = None
        if world.rank < mesh.size():
            group = mesh.get_group()
            other = blank()
            other = shard(other, mesh) if step == 2 else other
            steps = trained(other, world.rank)
            found = checkpoint.load(folder, other, steps, step=4, group=group)
            assert found == (4, {"tokens": 77, "seed": "a"})
            assert_same(state_of(other, steps), wanted)
            checkpoint.save(folder, step, other, steps, group=group)
        dist.barrier()
        back = blank()
        parallelize_module(back, grid["tp"], {"moe": moxie.distributed.ExpertTensorParallel()})
        shard(back, grid["dp"])
        steps = trained(back, world.rank)
        assert checkpoint.load(folder, back, steps, step=step)[0] == step
        assert_same(state_of(back, steps), wanted)
    assert checkpoint.steps(folder) == [1, 2, 4]


def wrapped(layer: moxie.nn.MoE, wrapper: str) -> nn.Module:
    if wrapper == "DistributedDataParallel":
        names = ["experts.w13", "experts.w2"]  # every rank has its own experts, so DDP must not average their gradients
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(layer, names)
        return DistributedDataParallel(layer)
    layer.experts = checkpoint_wrapper(layer.experts) if wrapper == "checkpoint_wrapper" else torch.compile(layer.experts)
    return layer


def experts_of_a_group_keep_their_places_in_wrappers(world: World) -> None:
    for step, wrapper in enumerate(("checkpoint_wrapper", "torch.compile", "DistributedDataParallel")):
        layer = moxie.nn.MoE(D, 64, E, 2, ep_group=dist.group.WORLD)
        experts, wanted = layer.experts, [weight.detach().clone() for weight in layer.experts.parameters()]
        model = wrapped(layer, wrapper)
        checkpoint.save(world.folder / "wrapped", step, model)
        with torch.no_grad():
            for weight in experts.parameters():
                weight.fill_(float("nan"))
        checkpoint.load(world.folder / "wrapped", model, step=step)
        plain = moxie.nn.MoE(D, 64, E, 2)  # all experts, without the wrapper
        checkpoint.load(world.folder / "wrapped", plain, step=step)
        for weight, of_all, before in zip(experts.parameters(), plain.experts.parameters(), wanted):
            assert torch.equal(weight, before), wrapper
            assert torch.equal(of_all.chunk(world.size)[world.rank], before), wrapper


def extra_comes_back_as_the_first_rank_gave_it(world: World) -> None:
    extra = {"a": {"b": {}, 1: [torch.arange(3), (None, 2.5)]}, "x.y": [], 7: "z" * world.rank, "bytes": b"\0\1"}
    checkpoint.save(world.folder / "extra", 0, nn.Linear(4, 4), extra=extra)
    _, found = checkpoint.load(world.folder / "extra", nn.Linear(4, 4))
    assert torch.equal(found["a"][1].pop(0), torch.arange(3))
    assert found == {"a": {"b": {}, 1: [(None, 2.5)]}, "x.y": [], 7: "", "bytes": b"\0\1"}


class Stock(nn.Module):
    """A model of plain torch."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(D, D)
        self.w1 = nn.Parameter(torch.randn(E, D, D) * D**-0.5)

    def forward(self, x):
        offs = torch.tensor([5, 5, 14, x.shape[0]], dtype=torch.int32)
        return torch._grouped_mm(self.up(x), self.w1.mT, offs=offs) * 1


def checkpoints_move_between_converted_and_stock_models(world: World) -> None:
    mesh, folder = mesh_of(world.size, names=("dp",)), world.folder / "stock"
    torch.manual_seed(6)
    converted = Stock()
    moxie.quantize_(converted, "mxfp8_rceil")
    shard(converted, mesh)
    optimizer = trained(converted, world.rank)
    wanted = state_of(converted, optimizer)
    checkpoint.save(folder, 0, converted, optimizer)
    stock = shard(Stock(), mesh)
    steps = trained(stock, world.rank)
    assert checkpoint.load(folder, stock, steps) == (0, {})
    assert_same(state_of(stock, steps), wanted)
    checkpoint.save(folder, 1, stock, steps)
    back = shard(copy.deepcopy(Stock()), mesh)
    moxie.quantize_(back, "mxfp8_rceil")
    steps = trained(back, world.rank)
    assert checkpoint.load(folder, back, steps)[0] == 1
    assert_same(state_of(back, steps), wanted)
