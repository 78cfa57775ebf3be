"""Cases that test_distributed.py runs on every rank: expert parallelism on one mesh with FSDP2, tensor parallelism and
checkpoints."""

import pathlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import moxie
import moxie.distributed
import moxie.nn
from moxie.distributed import checkpoint
from ranks import World
from sharded_models import MIXED, D, E, K, decibels, mesh_of, tokens, whole
from sharded_references import HIDDEN, Layer, OneProcess, Sizes, loss_of, moe_of_groups, seeded

EXACT = float("inf")
# Meshes by number of ranks. Together they put FSDP2 over expert parallelism, over tensor parallelism, and over both.
MESHES = {2: (Sizes(ep=2), Sizes(tp=2)), 4: (Sizes(dp=2, ep=2), Sizes(ep=4), Sizes(ep=2, tp=2)), 8: (Sizes(dp=2, ep=2, tp=2),)}


def mesh_for(sizes: Sizes) -> DeviceMesh:
    return mesh_of(sizes.dp, sizes.ep, sizes.tp, names=("dp", "ep", "tp"))


def batch_of(mesh: DeviceMesh) -> int:
    """Returns which batch of tokens this rank has. Ranks of one 'tp' group have the same batch."""
    return mesh["dp"].get_local_rank() * mesh["ep"].size() + mesh["ep"].get_local_rank()


def split(mesh: DeviceMesh, compiles: str | None = None, **options) -> Layer:
    """Makes a model whose experts are spread over 'ep'. Over 'tp' it splits the hidden features of the experts and the outputs of
    the linear."""
    model = seeded(ep_group=mesh["ep"], **options)
    if mesh["tp"].size() > 1:
        styles = {"moe": moxie.distributed.ExpertTensorParallel(), "up": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(model, mesh["tp"], styles)
    if compiles is not None:
        model.moe.compile(backend=compiles)
    return model


def sharded(mesh: DeviceMesh, compiles: str | None = None, **options) -> Layer:
    """Makes a split model and applies FSDP2: to the experts over 'dp', to everything else over 'dp' and 'ep' together."""
    model = split(mesh, compiles, **options)
    fully_shard(model.moe.experts, mesh=mesh["dp"], mp_policy=MIXED)
    model.moe.experts.set_gradient_divide_factor(mesh["dp"].size() * mesh["ep"].size())
    fully_shard(model, mesh=mesh["dp", "ep"]._flatten("batch"), mp_policy=MIXED)
    for module in model.modules():
        # If 'dp' has one rank, torch divides the experts' gradients itself, and would divide twice if sums were forced.
        alone = module is model.moe.experts and mesh["dp"].size() == 1
        if isinstance(module, FSDPModule) and not alone:
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no averaging reduction
    return model


def of_all_ranks(mesh: DeviceMesh, name: str, tensor: Tensor) -> Tensor:
    """Gathers a tensor's shards; experts, of which each rank of 'ep' has some, are joined too."""
    tensor = whole(tensor)
    if ".experts." not in name or ".shared." in name:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(mesh["ep"].size())]
    dist.all_gather(parts, tensor.contiguous(), group=mesh["ep"].get_group())
    return torch.cat(parts)


def check_gradients(mesh: DeviceMesh, model: nn.Module, wanted: nn.Module, least: float) -> None:
    for name, parameter in model.named_parameters():
        grad = wanted.get_parameter(name).grad
        got = of_all_ranks(mesh, name, parameter.grad)
        assert grad.any() and got.dtype == grad.dtype, name
        assert decibels(got, grad) >= least, (name, decibels(got, grad))


def gradients_on_a_mesh_are_those_of_the_same_splits_in_one_process(world: World) -> None:
    for sizes in MESHES[world.size]:
        mesh, shared = mesh_for(sizes), 128 * sizes.tp
        for recipe, wire, of_shared in (
            ("mxfp8_rceil_128", "unquantized", None),
            ("mxfp8_rceil_128", "fp8", shared),
            ("mxfp8_rceil", "fp8", None),
        ):
            options = {"recipe": recipe, "wire": wire, "shared_hidden_dim": of_shared}
            one = OneProcess(sizes, **options)
            loss = one.backward()
            model, batch = sharded(mesh, **options), batch_of(mesh)
            y = loss_of(model(tokens(batch)), batch)
            y.backward()
            dist.all_reduce(y.detach_())
            assert abs(y.item() / world.size - loss) <= 1e-6 * loss
            # Gloo adds four summands in another order.
            check_gradients(mesh, model, one.master, EXACT if sizes.batches <= 2 else 100)


def losses_on(mesh: DeviceMesh, model: nn.Module) -> list[float]:
    optimizer, found, batch = torch.optim.AdamW(model.parameters(), lr=1e-3), [], batch_of(mesh)
    for step in range(10):
        loss = loss_of(model(tokens(100 * step + batch)), batch, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_())
        found.append(loss.item() / dist.get_world_size())
    return found


def ten_steps_on_a_mesh(world: World) -> None:
    for sizes in MESHES[world.size]:
        mesh, one = mesh_for(sizes), OneProcess(sizes, "fp8")
        optimizer, wanted = torch.optim.AdamW(one.master.parameters(), lr=1e-3), []
        for step in range(10):
            wanted.append(one.backward(step))
            optimizer.step()
        for compiles in (None, "aot_eager"):
            torch._dynamo.reset()
            got = losses_on(mesh, sharded(mesh, compiles))
            worst = max(abs(a - b) / b for a, b in zip(got, wanted, strict=True))
            assert worst <= 5e-4, (sizes, compiles, worst, got, wanted)


def experts_of_a_group_under_tensor_parallelism(world: World) -> None:
    """The 'ep' group has one rank if there are two ranks in all, and two if there are four."""
    sizes = Sizes(ep=world.size // 2, tp=2)
    mesh = mesh_for(sizes)
    rank = mesh["ep"].get_local_rank()
    for wire, shared in (("unquantized", None), ("fp8", 256)):
        options = {"dtype": torch.bfloat16, "shared_hidden_dim": shared}
        ones = [seeded(**options).moe for _ in range(sizes.ep)]
        xs = [tokens(i).requires_grad_() for i in range(sizes.ep)]
        wanted = moe_of_groups(ones, xs, 2, wire)
        torch.autograd.backward(wanted, [tokens(50 + i) for i in range(sizes.ep)])
        layer, x = split(mesh, wire=wire, **options).moe, tokens(rank).requires_grad_()
        y = layer(x)
        y.backward(tokens(50 + rank))
        assert torch.equal(y, wanted[rank]) and torch.equal(x.grad, xs[rank].grad), wire
        for name, parameter in layer.named_parameters():
            ours = ".experts." in f".{name}" and "shared" not in name
            one = ones[0 if ours else rank].get_parameter(name).grad
            assert torch.equal(whole(parameter.grad), one.chunk(sizes.ep)[rank] if ours else one), (wire, name)


def checkpoints_of_experts_of_a_group(world: World) -> None:
    for i, sizes in enumerate(MESHES[world.size]):
        save_and_load(world, mesh_for(sizes), world.folder / f"of groups {i}")


def save_and_load(world: World, mesh: DeviceMesh, folder: pathlib.Path) -> None:
    model = sharded(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(tokens(batch_of(mesh))).float().square().mean().backward()
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
    back = sharded(mesh)
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
