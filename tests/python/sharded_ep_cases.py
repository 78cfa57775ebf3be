"""Cases of test_distributed.py: expert parallelism with FSDP2, tensor parallelism and checkpoints, on one mesh."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

import moxie
import moxie.distributed
import moxie.nn
from moxie.distributed import checkpoint
from ranks import World
from sharded_models import MIXED, D, E, K, decibels, gradients, mesh_of, tokens, whole

EXACT = float("inf")
HIDDEN = 256


class Layer(nn.Module):
    """A linear before the experts, so that gradients of tokens count too."""

    def __init__(self, **options):
        super().__init__()
        self.up = moxie.MXLinear(D, D)
        self.moe = moxie.nn.MoE(D, HIDDEN, E, K, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.up(x)
        return x + self.moe(x)


def seeded(**options) -> Layer:
    torch.manual_seed(11)
    return Layer(**options)


def loss_of(y: Tensor, rank: int, step: int) -> Tensor:
    return (y.float() - tokens(7 + 100 * step + rank).float()).square().mean()


def of_groups(model: nn.Module, size: int, per_group: int, step: int = 0) -> Tensor:
    """The mean loss of all ranks, in one process: the tokens of each ep_group go through the layer together."""
    total = torch.zeros(())
    for first in range(0, size, per_group):
        members = range(first, first + per_group)
        ys = model(torch.cat([tokens(100 * step + rank) for rank in members])).chunk(per_group)
        total = total + sum(loss_of(y, rank, step) for rank, y in zip(members, ys, strict=True)) / size
    return total


class Bf16(nn.Module):
    """Computes with bf16 copies of f32 weights, as FSDP2's mixed precision does; gradients are f32."""

    def __init__(self, master: nn.Module):
        super().__init__()
        self.master = master

    def forward(self, x: Tensor) -> Tensor:
        cast = {name: parameter.bfloat16() for name, parameter in self.master.named_parameters()}
        return torch.func.functional_call(self.master, cast, (x,))


def sharded(mesh, size: int, compiles: bool = False, **options) -> Layer:
    """Experts over 'ep', FSDP2 of experts over 'dp', and of all else over all ranks."""
    model = seeded(ep_group=mesh["ep"], **options)
    if compiles:
        model.moe.compile(backend="aot_eager")
    fully_shard(model.moe.experts, mesh=mesh["dp"], mp_policy=MIXED)
    model.moe.experts.set_gradient_divide_factor(size)
    fully_shard(model, mesh=mesh["dp", "ep"]._flatten("all"), mp_policy=MIXED)
    for module in model.modules():
        alone = module is model.moe.experts and mesh["dp"].size() == 1  # torch would divide twice
        if isinstance(module, FSDPModule) and not alone:
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no other
    return model


def of_all_ranks(mesh, name: str, tensor: Tensor) -> Tensor:
    """A whole tensor; experts of the ep_group are joined."""
    tensor = whole(tensor)
    if ".experts." not in name:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(mesh["ep"].size())]
    dist.all_gather(parts, tensor.contiguous(), group=mesh["ep"].get_group())
    return torch.cat(parts)


def experts_of_a_group_under_fsdp(world: World) -> None:
    size = world.size
    mesh = mesh_of(size // 2, 2, names=("dp", "ep"))
    one = Bf16(seeded())
    of_groups(one, size, 2).backward()
    wanted = {name.removeprefix("master."): grad for name, grad in gradients(one).items()}
    for wire in ("unquantized", "fp8"):
        model = sharded(mesh, size, wire=wire)
        loss_of(model(tokens(world.rank)), world.rank, 0).backward()
        for name, parameter in model.named_parameters():
            got = of_all_ranks(mesh, name, parameter.grad)
            # Each rank rounds its own gradient of dense weights to bf16.
            least = 45 if ".experts." not in name else EXACT if wire == "unquantized" and size == 2 else 80
            assert decibels(got, wanted[name]) >= least, (wire, name, decibels(got, wanted[name]))


def ten_steps_of_experts_of_a_group_under_fsdp(world: World) -> None:
    size = world.size
    mesh = mesh_of(size // 2, 2, names=("dp", "ep"))
    one, losses = Bf16(seeded()), []
    for model in (one, sharded(mesh, size), sharded(mesh, size, compiles=True)):
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=2e-4), []
        for step in range(10):
            loss = (
                of_groups(model, size, 2, step)
                if model is one
                else loss_of(model(tokens(100 * step + world.rank)), world.rank, step)
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = loss.detach().clone()
            if model is not one:
                dist.all_reduce(loss)
                loss /= size
            found.append(loss.item())
        losses.append(found)
    worst = max(abs(a - b) / b for found in losses[1:] for a, b in zip(found, losses[0], strict=True))
    assert worst <= 5e-4, (worst, losses)


def experts_of_a_group_under_tensor_parallelism(world: World) -> None:
    """On two ranks the ep_group has one rank; on four, two."""
    mesh = mesh_of(world.size // 2, 2, names=("ep", "tp"))
    ep = mesh["ep"].size()
    style = moxie.distributed.ExpertTensorParallel()
    rank = mesh["ep"].get_local_rank()
    torch.manual_seed(11)
    one = moxie.nn.MoE(D, HIDDEN, E, K, dtype=torch.bfloat16)
    parallelize_module(one, mesh["tp"], style)  # all experts, the same split of features
    torch.manual_seed(11)
    layer = moxie.nn.MoE(D, HIDDEN, E, K, dtype=torch.bfloat16, ep_group=mesh["ep"], wire="unquantized")
    parallelize_module(layer, mesh["tp"], style)
    every = torch.cat([tokens(i) for i in range(ep)]).requires_grad_()
    dy = torch.cat([tokens(50 + i) for i in range(ep)])
    wanted = one(every)
    wanted.backward(dy)
    x = tokens(rank).requires_grad_()
    y = layer(x)
    y.backward(dy.chunk(ep)[rank])
    assert torch.equal(y, wanted.chunk(ep)[rank]) and torch.equal(x.grad, every.grad.chunk(ep)[rank])
    for name in ("w13", "w2"):
        got, of_one = (whole(getattr(experts, name).grad) for experts in (layer.experts, one.experts))
        assert torch.equal(got, of_one.chunk(ep)[rank]), name


def checkpoints_of_experts_of_a_group(world: World) -> None:
    size, folder = world.size, world.folder / "of groups"
    mesh = mesh_of(size // 2, 2, names=("dp", "ep"))
    model = sharded(mesh, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(tokens(world.rank)).float().square().mean().backward()
    optimizer.step()
    wanted = {name: of_all_ranks(mesh, name, tensor.detach()) for name, tensor in model.state_dict().items()}
    moment = of_all_ranks(mesh, ".experts.", optimizer.state[model.moe.experts.w2]["exp_avg"])
    checkpoint.save(folder, 1, model, optimizer)
    torch.manual_seed(12)
    plain = Layer()  # every rank holds all experts
    steps = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    plain(tokens(0, torch.float32)).square().mean().backward()
    steps.step()
    assert checkpoint.load(folder, plain, steps)[0] == 1
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name
    assert torch.equal(steps.state[plain.moe.experts.w2]["exp_avg"], moment)
    checkpoint.save(folder, 2, plain, steps)
    back = sharded(mesh, size)
    with torch.no_grad():
        for parameter in back.parameters():
            parameter.zero_()
    assert checkpoint.load(folder, back)[0] == 2
    for name, tensor in back.state_dict().items():
        assert torch.equal(of_all_ranks(mesh, name, tensor.detach()), wanted[name]), name


def experts_of_a_group_start_as_in_one_process_under_fsdp(world: World) -> None:
    mesh = mesh_of(world.size // 2, 2, names=("dp", "ep"))
    torch.manual_seed(5)
    one = moxie.nn.GroupedExperts(D, HIDDEN, E)
    with torch.device("meta"):
        layer = moxie.nn.MoE(D, HIDDEN, E, K, ep_group=mesh["ep"])
    fully_shard(layer.experts, mesh=mesh["dp"])
    layer.experts.to_empty(device="cpu")
    torch.manual_seed(5)
    layer.experts.reset_parameters()
    for name in ("w13", "w2"):
        got = of_all_ranks(mesh, f"moe.experts.{name}", getattr(layer.experts, name).detach())
        assert torch.equal(got, getattr(one, name)), name


def biases_of_replicas_move_together(world: World) -> None:
    mesh = mesh_of(world.size // 2, 2, names=("dp", "ep"))
    layer = moxie.nn.MoE(D, HIDDEN, E, K, ep_group=mesh["ep"], balance="bias", dtype=torch.bfloat16)
    for step in range(3):
        layer(tokens(10 * step + world.rank))
        layer.router.update_bias_(mesh["dp"])
    biases = [torch.empty_like(layer.router.bias) for _ in range(world.size)]
    dist.all_gather(biases, layer.router.bias)
    assert biases[0].any() and all(torch.equal(bias, biases[0]) for bias in biases)


def tokens_as_a_dtensor_over_the_group_are_refused(world: World) -> None:
    mesh = mesh_of(world.size, names=("ep",))
    layer = moxie.nn.MoE(D, HIDDEN, E, K, ep_group=mesh["ep"], dtype=torch.bfloat16)
    x = DTensor.from_local(tokens(world.rank), mesh, [Shard(0)])
    try:
        layer(x)
    except ValueError as error:
        assert "x must hold this rank's tokens" in str(error), error
    else:
        raise AssertionError("not refused")
