"""Cases that test_distributed.py runs on every rank: ten training steps, also compiled and with selective checkpointing."""

import copy
import functools
from collections import Counter

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import moxie
import moxie.distributed
import moxie.nn
from ranks import World
from sharded_models import D, E, F, Model, assert_close, gradients, loss_of_rank, mesh_of, shard

STEPS = 10


def losses(model: nn.Module, ranks: range, mean_over_ranks: bool) -> list[float]:
    """Trains ten steps with AdamW and returns the losses. If `ranks` are several, one process accumulates the gradients of their
    batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for step in range(STEPS):
        total = torch.zeros(())
        for rank in ranks:
            loss = loss_of_rank(model, rank, step) / len(ranks)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        if mean_over_ranks:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        found.append(total.item())
    return found


def assert_near(got: list[float], wanted: list[float]) -> None:
    worst = max(abs(a - b) / b for a, b in zip(got, wanted, strict=True))
    assert worst <= 5e-4, (worst, got, wanted)


class Autocast(nn.Module):
    """A model with f32 weights that computes with bf16 copies of them, as FSDP2's mixed precision does."""

    def __init__(self, master: nn.Module):
        super().__init__()
        self.master = master

    def forward(self, x: Tensor) -> Tensor:
        cast = {name: parameter.bfloat16() for name, parameter in self.master.named_parameters()}
        return torch.func.functional_call(self.master, cast, (x,))


@functools.cache
def in_one_process(size: int) -> tuple[float, ...]:
    torch.manual_seed(8)
    return tuple(losses(Autocast(Model(hidden=256)), range(size), mean_over_ranks=False))


def fresh() -> Model:
    torch.manual_seed(8)
    return Model(hidden=256)


def ten_steps_of_fsdp(world: World) -> None:
    mesh, wanted = mesh_of(world.size, names=("dp",)), list(in_one_process(world.size))
    for backend in (None, "aot_eager"):
        model = fresh()
        if backend is not None:
            model.moe.compile(backend=backend)
            model.up.compile(backend=backend)
        shard(model, mesh, within=(moxie.nn.MoE,))
        assert_near(losses(model, range(world.rank, world.rank + 1), mean_over_ranks=True), wanted)


def ten_steps_of_tensor_parallelism(world: World) -> None:
    mesh = mesh_of(world.size, names=("tp",))
    torch.manual_seed(8)
    master = Model(torch.bfloat16, recipe="mxfp8_rceil", hidden=32 * world.size)
    wanted = losses(copy.deepcopy(master), range(1), mean_over_ranks=False)
    for backend in (None, "aot_eager"):
        model = copy.deepcopy(master)
        styles = {"moe": moxie.distributed.ExpertTensorParallel(), "up": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(model, mesh, styles)
        if backend is not None:
            model = torch.compile(model, backend=backend)
        assert_near(losses(model, range(1), mean_over_ranks=False), wanted)


def ten_steps_of_fsdp_over_tensor_parallelism(world: World) -> None:
    if world.size != 4:
        return
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    wanted = list(in_one_process(2))
    model = fresh()
    parallelize_module(model, mesh["tp"], {"moe": moxie.distributed.ExpertTensorParallel()})
    shard(model, mesh["dp"], within=(moxie.nn.MoE,))
    rank = mesh["dp"].get_local_rank()
    assert_near(losses(model, range(rank, rank + 1), mean_over_ranks=True), wanted)


def weights_that_are_not_kept_are_freed_between_forward_and_backward(world: World) -> None:
    """After forward FSDP2 frees the weights that it gathered. With keep_w=false backward reads the weight alone, which FSDP2 then
    gathers again; otherwise the FP8 form for dgrad stays in memory, for every layer of the model."""
    mesh = mesh_of(world.size, names=("dp",))
    found, held = [], []
    for recipe in ("mxfp8_rceil_128", "mxfp8_rceil_128:keep_w=false"):
        torch.manual_seed(8)
        model = shard(Model(recipe=recipe), mesh, within=(moxie.nn.GroupedExperts, moxie.MXLinear))
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            loss = loss_of_rank(model, world.rank)
        of_experts = [t for t in saved if t.dim() == 3 and t.shape[0] == E]
        held.append(sum(t.untyped_storage().nbytes() for t in of_experts if t.dtype in (torch.bfloat16, torch.float8_e4m3fn)))
        loss.backward()
        found.append(gradients(model))
    assert held == [E * 3 * F * D, 0], held
    assert_close(found[1], found[0], float("inf"))


# ---- selective checkpointing ------------------------------------------------------------------------------------------------

PRODUCT = torch.ops.moxie.grouped_mm.quantized


class Checkpointed(nn.Module):
    """A layer under selective checkpointing: backward computes its forward again, and only grouped products may be kept
    instead."""

    def __init__(self, layer: nn.Module, keeps_products: bool):
        super().__init__()
        kept = CheckpointPolicy.MUST_SAVE if keeps_products else CheckpointPolicy.MUST_RECOMPUTE
        self.layer = layer
        self.policy = lambda ctx, op, *args, **kwargs: kept if op == PRODUCT else CheckpointPolicy.PREFER_RECOMPUTE

    def forward(self, x):
        contexts = functools.partial(create_selective_checkpoint_contexts, self.policy)
        return checkpoint(self.layer, x, use_reentrant=False, context_fn=contexts)


def counting(counts: Counter):
    """Returns a compiler backend that runs graphs as they are and counts the forward products (PRODUCT) in forward and in
    backward graphs."""

    def compiler(kind: str):
        def compiled(graph, example):
            counts[kind] += sum(node.target == PRODUCT for node in graph.graph.nodes)
            return make_boxed_func(graph.forward)

        return compiled

    return aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        partition_fn=min_cut_rematerialization_partition,
    )


def compiled_checkpoints_under_fsdp_keep_what_the_policy_says(world: World) -> None:
    mesh, wanted = mesh_of(world.size, names=("dp",)), list(in_one_process(world.size))
    for keeps in (True, False):
        for compiles in (False, True):
            torch._dynamo.reset()
            model, counts = fresh(), Counter()
            layer = model.moe
            model.moe = Checkpointed(layer, keeps)
            if compiles:
                model.moe.compile(backend=counting(counts), fullgraph=True)
            shard(model, mesh, within=(Checkpointed,))
            assert_near(losses(model, range(world.rank, world.rank + 1), mean_over_ranks=True), wanted)
            # Forward multiplies by w13 and w2. Backward repeats only the product with w13, unless it is kept: nothing needs w2's
            # result again, and dgrad is another op.
            if compiles:
                assert counts == Counter(forward=2, backward=0 if keeps else 1), counts


def fp8_gathers_compiled_and_checkpointed(world: World) -> None:
    """With FP8 gathers, losses fall as with bf16 ones but are not the same: FP8 gathers round weights from f32, bf16 ones round
    to bf16 first."""
    mesh, found = mesh_of(world.size, names=("dp",)), []
    for compiles in (False, True):
        torch._dynamo.reset()
        model = fresh()
        if compiles:
            model.moe = Checkpointed(model.moe, keeps_products=True)
            model.moe.compile(backend="aot_eager", fullgraph=True)
        shard(model, mesh, within=(Checkpointed,) if compiles else (moxie.nn.MoE,))
        assert len(moxie.distributed.quantize_all_gather_(model.moe)) == 2
        found.append(losses(model, range(world.rank, world.rank + 1), mean_over_ranks=True))
    assert_near(found[1], found[0])
    assert abs(found[0][-1] / in_one_process(world.size)[-1] - 1) < 0.01
