"""Cases of test_expert_parallel.py about the engines. CPUs have no symmetric memory: where a case needs it, ranks map files
instead, and everything else is as on GPUs."""

import contextlib
import functools
import itertools

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import moxie.nn
from expert_parallel_layers import DIM, EXPERTS, HIDDEN, TOKENS, TOP_K, compare, error_of, inputs, shares, step
from moxie import symmetric
from moxie.symmetric import Shared, Symmetric

NAMES: list[str] = []
ENGINE = Symmetric(timeout=120.0)


def case(function, name=None):
    NAMES.append(name or function.__name__)
    globals()[NAMES[-1]] = function
    return function


@contextlib.contextmanager
def memory_in_files(world):
    """Gives the ranks files in place of torch's symmetric memory."""
    count = itertools.count()

    def make(member, group, capacity, device):
        size = torch.ops.moxie._exchange_bytes(member.size, capacity)
        name = world.folder / f"memory-{next(count)}"
        mine = f"{name}-{member.rank}"
        with open(mine, "wb") as file:
            file.truncate(size)
        dist.barrier(group)
        files = [torch.from_file(f"{name}-{rank}", shared=True, size=size, dtype=torch.uint8) for rank in range(member.size)]
        shared = Shared(group, name.name, files[member.rank], [memory.data_ptr() for memory in files], capacity)
        shared.handle = files
        return shared

    before = symmetric._make, symmetric._check_device
    symmetric._make, symmetric._check_device = make, lambda x: None
    try:
        yield
    finally:
        symmetric._make, symmetric._check_device = before
        dist.barrier()


def with_shared_memory(function):
    def run(world):
        # A folder for each case, so that no file is found again.
        world.folder = world.folder / function.__name__
        world.folder.mkdir(exist_ok=True)
        with memory_in_files(world):
            function(world)
        world.folder = world.folder.parent

    return case(run, function.__name__)


def layers(recipe, engine=ENGINE, skewed=False, **options):
    """Makes an MoE layer in one process and one over the group, with the same weights."""
    made = []
    for over_group in ({}, {"ep_group": dist.group.WORLD, "engine": engine, "wire": options.pop("wire", None)}):
        torch.manual_seed(1)
        layer = moxie.nn.MoE(
            DIM,
            HIDDEN,
            EXPERTS,
            TOP_K,
            recipe=recipe,
            score="sigmoid",
            balance="bias",
            **over_group,
            **{"dtype": torch.bfloat16, **options},
        )
        if skewed:
            layer.router.bias[:TOP_K] += 100
        made.append(layer)
    return made


def problem(world, counts=None):
    mine, total = shares(world.rank, world.size, counts)
    torch.manual_seed(2)
    return mine, inputs("normal", total, torch.bfloat16), inputs("normal", total, torch.bfloat16)


@with_shared_memory
def layers_over_shared_memory_have_the_bits_of_one_process(world):
    for recipe, wire in (("bf16", "unquantized"), ("mxfp8_rceil", "fp8"), ("mxfp8_rceil_128", "unquantized")):
        torch.manual_seed(1)
        local = moxie.nn.MoE(DIM, HIDDEN, EXPERTS, TOP_K, recipe=recipe, dtype=torch.bfloat16, score="sigmoid", balance="bias")
        _, parallel = layers(recipe)
        parallel.experts.wire = wire
        mine, x, dy = problem(world)
        compare(world.rank, world.size, local, parallel, x, dy, mine=mine, wire=wire)
        parallel.check()
        parallel.router.update_bias_()


@with_shared_memory
def biases_have_the_bits_of_the_engine_c10d(world):
    kinds = (("bf16", {}), ("mxfp8_rceil", {"w13_layout": "interleaved"}), ("mxfp8_rceil", {"dtype": torch.float32}))
    for recipe, options in kinds:
        local, parallel = layers(recipe, bias=True, **options)
        _, other = layers(recipe, bias=True, engine="c10d", **options)
        mine, x, dy = problem(world)
        x, dy = x.to(local.experts.w13.dtype), dy.to(local.experts.w13.dtype)
        compare(world.rank, world.size, local, parallel, x, dy, mine=mine, wire=parallel.experts.wire)
        step(other, x[mine], dy[mine])
        for name, gradient in parallel.named_parameters():
            assert torch.equal(gradient.grad, other.get_parameter(name).grad), f"{name} of {recipe} {options}"
        parallel.check()
    # A layer without biases has left no room for those of the next.
    _, without = layers("mxfp8_rceil")
    step(without, x[mine].bfloat16(), dy[mine].bfloat16())
    _, after = layers("mxfp8_rceil", bias=True)
    assert step(after, x[mine].bfloat16(), dy[mine].bfloat16())[0].isfinite().all()
    after.check()


@with_shared_memory
def layers_of_a_group_share_memory_and_grow_it(world):
    local, first = layers("mxfp8_rceil")
    _, second = layers("mxfp8_rceil")
    mine, x, dy = problem(world)
    compare(world.rank, world.size, local, first, x, dy, mine=mine, wire="fp8")
    step(second, x[mine], dy[mine])
    assert first.experts._place.shared is second.experts._place.shared
    _, third = layers("mxfp8_rceil", engine=Symmetric(max_tokens=4 * TOKENS, timeout=120.0))
    mine, x, dy = problem(world, [3 * TOKENS] * world.size)
    local.zero_grad()
    compare(world.rank, world.size, local, third, x, dy, mine=mine, wire="fp8")
    assert third.experts._place.shared is not first.experts._place.shared
    step(first, x[:3], dy[:3])  # still in the memory that it has
    first.check()


@with_shared_memory
def checkpoints_and_calls_without_gradients_exchange_too(world):
    local, parallel = layers("mxfp8_rceil_128")
    mine, x, dy = problem(world)
    y, dx = step(local, x, dy)
    own = x[mine].clone().requires_grad_()
    made = checkpoint(parallel, own, use_reentrant=False)
    made.backward(dy[mine])
    assert torch.equal(made, y[mine]) and torch.equal(own.grad, dx[mine])
    with torch.no_grad():
        assert torch.equal(parallel(x[mine]), y[mine])
    with torch.inference_mode():
        assert torch.equal(parallel(x[mine]), y[mine])


@with_shared_memory
def gradients_may_be_wanted_of_other_things_on_each_rank(world):
    local, parallel = layers("mxfp8_rceil")
    mine, x, dy = problem(world)
    _, dx = step(local, x, dy)
    if world.rank == 0:
        parallel.requires_grad_(False)
    own = x[mine].clone().requires_grad_(world.rank == 0)
    parallel(own).backward(dy[mine])
    assert world.rank != 0 or torch.equal(own.grad, dx[mine])
    assert (parallel.experts.w13.grad is None) == (world.rank == 0)
    parallel.check()


@with_shared_memory
def too_many_rows_are_an_error_and_new_layers_work_again(world):
    _, parallel = layers("mxfp8_rceil", engine=Symmetric(max_rows=40, timeout=120.0), skewed=True)
    mine, x, dy = problem(world)
    y, dx = step(parallel, x[mine], dy[mine])
    assert y.isnan().all() and dx.isnan().all() and parallel.experts.w13.grad.isnan().all()
    for error in (error_of(parallel.check), error_of(lambda: parallel(x[mine]))):
        assert isinstance(error, RuntimeError), error
        for part in ("rank 0 got", "max_rows is 40", f"rank {world.rank} of the {world.size} ranks", "group '0'"):
            assert part in str(error), (part, error)
    dist.barrier()
    local, again = layers("mxfp8_rceil", skewed=True, engine=Symmetric(max_rows=TOKENS * TOP_K * world.size, timeout=120.0))
    compare(world.rank, world.size, local, again, x, dy, mine=mine, wire="fp8")


@with_shared_memory
def a_recipe_that_changes_on_one_rank_is_an_error_on_all(world):
    local, parallel = layers("mxfp8_rceil")
    mine, x, dy = problem(world)
    step(parallel, x[mine], dy[mine])
    last = world.size - 1
    if world.rank == last:
        parallel.experts.set_recipe_("mxfp8_rceil_128")
    y, dx = step(parallel, x[mine], dy[mine])
    if world.size == 1:  # nothing differs
        local.experts.set_recipe_("mxfp8_rceil_128")
        assert torch.equal(y, step(local, x, dy)[0])
        return
    assert y.isnan().all() and dx.isnan().all()
    error = error_of(parallel.check)
    assert isinstance(error, RuntimeError) and f"rank {last} differs from rank 0" in str(error), error


@case
def the_symmetric_engine_is_refused_where_it_cannot_run(world):
    make = functools.partial(moxie.nn.MoE, DIM, HIDDEN, EXPERTS, TOP_K, ep_group=dist.group.WORLD, dtype=torch.bfloat16)
    for options, words in (
        ({"engine": "nccl"}, "engine must be c10d, symmetric"),
        ({"engine": "symmetric" if world.rank == 0 else "c10d"}, "must agree on engine"),
    ):
        error = error_of(functools.partial(make, **options))
        if world.size == 1 and "agree" in words:
            continue
        assert isinstance(error, ValueError) and words in str(error), (options, error)
    layer = make(engine=Symmetric(max_rows=100))
    assert "engine Symmetric(max_rows=100" in repr(layer.experts), repr(layer.experts)
    error = error_of(lambda: layer(inputs("normal", TOKENS, torch.bfloat16)))
    assert isinstance(error, ValueError) and "takes CUDA tensors" in str(error), error
    layer.check()  # nothing has failed
