"""Cases that test_distributed.py runs on every rank: misuse that is refused. Each raises an error on every rank and leaves none
waiting."""

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import moxie
import moxie.distributed
import moxie.nn
from moxie.distributed import ExpertTensorParallel, checkpoint, gate_up_shard, quantize_all_gather_
from ranks import World
from sharded_models import D, E, F, K, Model, mesh_of, shard, tokens

OFFS = torch.tensor([5, 5, 14, 24], dtype=torch.int32)


def refused(error: type[Exception], *words: str):
    """Decorates a misuse: running it fails unless it raises `error` with these words on every rank."""

    def decorate(misuse):
        def run(world: World, mesh) -> None:
            try:
                misuse(world, mesh)
                found = "nothing raised"
            except error as caught:
                missing = [word for word in words if word not in str(caught)]
                found = f"{missing} not in: {caught}" if missing else ""
            said: list = [None] * world.size
            # Collects the verdicts of all ranks; hangs, and so fails, if a rank is still inside the misuse.
            dist.all_gather_object(said, found)
            assert not any(said), (misuse.__name__, said)

        MISUSES.append(run)
        return run

    return decorate


MISUSES: list = []


def layer(hidden: int = F, **options) -> moxie.nn.MoE:
    return moxie.nn.MoE(D, hidden, E, K, **options)


def product(placement, n: int = 512, k: int = 512, mesh=None, recipe="mxfp8_rceil_128"):
    w = distribute_tensor(torch.randn(E, n, k), mesh, [placement])
    return moxie.grouped_mm(distribute_tensor(torch.randn(24, k), mesh, [Replicate()]), w, OFFS, recipe=recipe)


@refused(ValueError, "a shard of w must be a multiple of the recipe's blocks of 128", "ranks of 'tp'", "two scales")
def a_column_shard_that_cuts_a_block(world, mesh):
    product(Shard(1), n=64 * world.size, mesh=mesh)


@refused(ValueError, "a shard of w must be a multiple of the recipe's blocks of 32", "16 columns")
def a_row_shard_that_cuts_a_block(world, mesh):
    product(Shard(2), k=16 * world.size, mesh=mesh, recipe="mxfp8_rceil")


@refused(ValueError, "rows of w must divide among the", "leave 1 over")
def shards_of_different_sizes(world, mesh):
    product(Shard(1), n=128 * world.size + 1, mesh=mesh)


@refused(ValueError, "experts of w must divide among")
def experts_that_do_not_divide(world, mesh):
    w = distribute_tensor(torch.randn(world.size + 1, 128, 128), mesh, [Shard(0)])
    moxie.grouped_mm(torch.randn(24, 128), w, torch.full((world.size + 1,), 24, dtype=torch.int32))


@refused(ValueError, "w must be replicated or sharded over one of its dims, got P", "redistribute it first")
def weights_that_are_partial_sums(world, mesh):
    w = DTensor.from_local(torch.randn(E, 128, 128), mesh, [Partial()], run_check=False)
    moxie.grouped_mm(torch.randn(24, 128), w, OFFS)


@refused(ValueError, "DTensors must be on one mesh, got x on", "and w on")
def operands_on_two_meshes(world, mesh):
    other = mesh_of(world.size, 1, names=("a", "b"))
    x = distribute_tensor(torch.randn(24, 128), other, [Replicate(), Replicate()])
    moxie.grouped_mm(x, distribute_tensor(torch.randn(E, 128, 128), mesh, [Replicate()]), OFFS)


@refused(ValueError, "offs must be replicated, got")
def sharded_offs(world, mesh):
    w = distribute_tensor(torch.randn(E, 128, 128), mesh, [Replicate()])
    moxie.grouped_mm(torch.randn(24, 128), w, distribute_tensor(OFFS, mesh, [Shard(0)]))


@refused(ValueError, "quantized_w must be None where weights are DTensors, got WeightCache")
def a_cache_of_whole_weights_with_sharded_ones(world, mesh):
    cache = moxie.WeightCache(torch.randn(E, 128, 128))
    moxie.grouped_mm(
        torch.randn(24, 128), distribute_tensor(torch.randn(E, 128, 128), mesh, [Replicate()]), OFFS, quantized_w=cache
    )


@refused(ValueError, "Shard(1) over 'tp' would part them", "gate_up_shard()")
def gates_parted_from_ups(world, mesh):
    w13, w2 = (distribute_tensor(torch.randn(E, *size), mesh, [at]) for size, at in (((1024, D), Shard(1)), ((D, 512), Shard(2))))
    moxie.expert_mlp(torch.randn(24, D), w13, w2, OFFS)


@refused(ValueError, "w13 and w2 must be sharded by gate_up_shard() and Shard(2)", "got")
def experts_sharded_in_two_ways(world, mesh):
    w13, w2 = (
        distribute_tensor(torch.randn(E, *size), mesh, [at]) for size, at in (((1024, D), Replicate()), ((D, 512), Shard(2)))
    )
    moxie.expert_mlp(torch.randn(24, D), w13, w2, OFFS)


@refused(ValueError, "a shard of weight must be a multiple of the recipe's blocks of 128, got 64")
def a_linear_too_small_for_the_mesh(world, mesh):
    parallelize_module(moxie.MXLinear(128, 64 * world.size), mesh, ColwiseParallel())(torch.randn(8, 128))


@refused(ValueError, "ExpertTensorParallel: a shard of w2 must be a multiple of the recipe's blocks of 128")
def experts_too_small_for_the_mesh(world, mesh):
    parallelize_module(layer(64 * world.size), mesh, ExpertTensorParallel())


@refused(ValueError, "the module must hold a GroupedExperts, got Linear")
def a_style_of_experts_for_a_linear(world, mesh):
    parallelize_module(nn.Linear(D, D), mesh, ExpertTensorParallel())


@refused(ValueError, "w13 is sharded already", "tensor parallelism comes first")
def experts_sharded_twice(world, mesh):
    moe = layer()
    parallelize_module(moe, mesh, ExpertTensorParallel())
    parallelize_module(moe, mesh, ExpertTensorParallel())


@refused(ValueError, "w13 is sharded already", "fully_shard")
def tensor_parallelism_after_fsdp(world, mesh):
    parallelize_module(fully_shard(layer(), mesh=mesh), mesh, ExpertTensorParallel())


@refused(ValueError, "a weight cache holds whole weights")
def tensor_parallelism_with_a_weight_cache(world, mesh):
    parallelize_module(layer(weight_cache=True), mesh, ExpertTensorParallel())


@refused(ValueError, "experts must be [out, in], concatenated, without bias and main_grad, got transposed True")
def tensor_parallelism_of_transposed_experts(world, mesh):
    parallelize_module(moxie.nn.GroupedExperts(D, F, E, transposed=True), mesh, ExpertTensorParallel())


@refused(ValueError, "ranks must agree on the shape of w13 of experts 0, got (4, 1024, 128) on rank 0")
def ranks_that_disagree_on_a_shape(world, mesh):
    parallelize_module(layer(F if world.rank == 0 else 2 * F), mesh, ExpertTensorParallel())


@refused(ValueError, "ranks must agree on the recipe of experts 0, got mxfp8_rceil_128 on rank 0 and mxfp8_rceil on rank 1")
def ranks_that_disagree_on_a_recipe(world, mesh):
    parallelize_module(layer(recipe="mxfp8_rceil_128" if world.rank == 0 else "mxfp8_rceil"), mesh, ExpertTensorParallel())


@refused(ValueError, "a weight cache holds whole weights")
def one_rank_that_refuses(world, mesh):
    parallelize_module(layer(weight_cache=world.rank == world.size - 1), mesh, ExpertTensorParallel())


@refused(ValueError, "input_layouts must be Replicate() or Shard(dim), got Partial")
def an_input_that_is_a_partial_sum(world, mesh):
    ExpertTensorParallel(input_layouts=Partial())


@refused(ValueError, "the model must be sharded by torch.distributed.fsdp.fully_shard first")
def fp8_gathers_of_a_whole_model(world, mesh):
    quantize_all_gather_(Model())


@refused(ValueError, "a shard of up.weight must hold whole blocks of 128 rows", "rows over")
def a_block_that_straddles_shards(world, mesh):
    quantize_all_gather_(shard(Model(), mesh))


@refused(ValueError, "experts.w13 is quantized in blocks of 128x128, and gathering it in 32x32 would round it twice")
def a_wire_block_too_small(world, mesh):
    quantize_all_gather_(shard(layer(), mesh), "32x32")


@refused(ValueError, "block must be 32x32 or 128x128, got '1x32'")
def a_wire_block_that_is_not_square(world, mesh):
    quantize_all_gather_(shard(layer(), mesh), "1x32")


@refused(ValueError, "by the rule floor, which may saturate again")
def a_rule_that_saturates_twice(world, mesh):
    quantize_all_gather_(shard(layer(recipe="mxfp8_floor"), mesh))


@refused(ValueError, "is gathered quantized already")
def fp8_gathers_twice(world, mesh):
    model = shard(layer(), mesh)
    quantize_all_gather_(model)
    quantize_all_gather_(model)


@refused(ValueError, "must hold a sharded weight that a recipe quantizes in blocks")
def fp8_gathers_of_bf16(world, mesh):
    quantize_all_gather_(shard(layer(recipe="bf16"), mesh))


@refused(ValueError, "ranks must agree on the block of experts.w13, got 32x32 on rank 0 and 128x128 on rank 1")
def ranks_that_disagree_on_a_block(world, mesh):
    quantize_all_gather_(shard(layer(recipe="mxfp8_rceil"), mesh), "32x32" if world.rank == 0 else "128x128")


@refused(ValueError, "w13 is sharded, and a weight cache is of the whole weight")
def a_weight_cache_after_sharding(world, mesh):
    moxie.quantize_(shard(layer(), mesh), moxie.MXFP8GroupedMMConfig(weight_cache=True))


@refused(TypeError, "w is a DTensor that stays sharded while torch multiplies by it", "moxie.grouped_mm")
def converting_a_tensor_parallel_parameter(world, mesh):
    model = nn.Module()
    model.w = nn.Parameter(distribute_tensor(torch.randn(E, 128, 128), mesh, [Shard(1)]))
    moxie.quantize_(model, moxie.MXFP8GroupedMMConfig())


@refused(ValueError, "x must be on the mesh of the experts")
def tokens_on_another_mesh(world, mesh):
    moe = parallelize_module(layer(), mesh, ExpertTensorParallel())
    other = mesh_of(world.size, 1, names=("a", "b"))
    moe(distribute_tensor(tokens(0, torch.float32), other, [Replicate(), Replicate()]))


def exchange_without_a_module(world, experts: int, **options):
    """Calls the op on this rank's tokens, with so many experts on this rank, and as many assumed on the others."""
    x = tokens(world.rank)
    ids = torch.rand(len(x), experts * world.size).topk(K).indices.int()
    offs, slot_of, row_of = moxie.route(ids, experts * world.size)
    w13, w2 = (torch.randn(experts, *size, dtype=x.dtype) for size in ((2 * F, D), (D, F)))
    arguments = {"recipe": "mxfp8_rceil", "wire": "fp8", **options}
    return torch.ops.moxie.expert_mlp.parallel(
        x, w13, w2, torch.rand(len(x), K), offs, slot_of, row_of, dist.group.WORLD.group_name, **arguments
    )


@refused(ValueError, "expert_mlp: w13 must have as many experts on every rank of group", "2 on rank", "3 on rank 1")
def ranks_with_different_numbers_of_experts(world, mesh):
    exchange_without_a_module(world, 3 if world.rank == 1 else 2)


@refused(ValueError, "expert_mlp: recipe, wire, dtypes, sizes, biases and activation must be those of every rank of group")
def ranks_with_different_recipes_without_a_module(world, mesh):
    exchange_without_a_module(world, 2, recipe="mxfp8_rceil" if world.rank == 1 else "mxfp8_rceil_128")


@refused(ValueError, "checkpoint.load: folder must hold a valid checkpoint", "which holds none")
def loading_from_an_empty_folder(world, mesh):
    checkpoint.load(world.folder / "nothing", Model())


@refused(ValueError, "step must be new, and there is a valid checkpoint")
def saving_a_step_twice(world, mesh):
    for _ in range(2):
        checkpoint.save(world.folder / "twice", 3, nn.Linear(4, 4))


@refused(ValueError, "ranks must agree on step, got 0 on rank 0 and 1 on rank 1")
def ranks_that_save_two_steps(world, mesh):
    checkpoint.save(world.folder / "steps", min(world.rank, 1), nn.Linear(4, 4))


@refused(ValueError, "weight must have the shape (8, 4), got (4, 4) in the checkpoint")
def loading_another_shape(world, mesh):
    folder = world.folder / "shape"
    checkpoint.save(folder, 0, nn.Linear(4, 4))
    checkpoint.load(folder, nn.Linear(4, 8))


@refused(ValueError, "is no valid checkpoint", "its save did not end")
def loading_a_checkpoint_without_its_marker(world, mesh):
    folder = world.folder / "marker"
    path = checkpoint.save(folder, 0, nn.Linear(4, 4))
    dist.barrier()
    if world.rank == 0:
        (path / checkpoint.MARKER).unlink()
    dist.barrier()
    checkpoint.load(folder, nn.Linear(4, 4), step=0)


@refused(ValueError, "checkpoint.save: step must be an integer of 0 or more, got 1.0")
def a_step_that_is_no_integer_on_one_rank(world, mesh):
    checkpoint.save(world.folder / "float", 1.0 if world.rank == 0 else 1, nn.Linear(4, 4))


@refused(ValueError, "checkpoint.save: folder must be one that every rank can use", "Not a directory")
def saving_below_a_file(world, mesh):
    (world.folder / f"file-{world.rank}").touch()
    dist.barrier()
    checkpoint.save(world.folder / "file-0", 0, nn.Linear(4, 4))


@refused(ValueError, "checkpoint.save: extra must hold what torch.load(weights_only=True) takes", "World")
def an_extra_that_could_not_be_loaded(world, mesh):
    checkpoint.save(world.folder / "object", 0, nn.Linear(4, 4), extra={"world": world if world.rank == 0 else 0})


@refused(ValueError, "checkpoint.save: folder must be one that every rank can use", "no space")
def a_marker_that_the_first_rank_cannot_write(world, mesh):
    with mock.patch.object(checkpoint, "_write_marker", side_effect=OSError("no space")):
        checkpoint.save(world.folder / "full", 0, nn.Linear(4, 4))


@refused(ValueError, "checkpoint.save: the state dict must hold all experts of a group, got none named experts.w13")
def experts_that_one_rank_leaves_out_of_the_state_dict(world, mesh):
    model = layer(ep_group=mesh)
    if world.rank == 0:
        model.experts._register_state_dict_hook(lambda _, state, prefix, __: state.__delitem__(f"{prefix}w13"))
    checkpoint.save(world.folder / "hidden", 0, model)


def misuse_is_an_error_on_every_rank(world: World) -> None:
    mesh = mesh_of(world.size, names=("tp",))
    assert len(MISUSES) >= 20
    for misuse in MISUSES:
        misuse(world, mesh)
    assert gate_up_shard() != Shard(1) and RowwiseParallel is not None
