"""Cases of test_expert_parallel_cuda.py, run on every rank by ranks.py: the symmetric engine between processes that share a GPU,
or have one each. Each compares with the layer of one process that gets the tokens of all ranks, and with the engine c10d."""

import contextlib
import functools
import os
import time

import torch
import torch.distributed as dist

import moxie
from moxie.expert_parallel import Member, ParallelExperts, member_of
from moxie.symmetric import Symmetric
from symmetric_ranks import Grads, Problem, leaves, one_process, problem, share_of_experts, with_rounded_tokens
from wire_reference import decibels

TOKENS = 96  # of each rank
DIMS = {"dim": 256, "hidden": 384}
STEPS = int(os.environ.get("MOXIE_TEST_EXCHANGE_STEPS", "1000"))
WIRES = {"bf16": ("unquantized",), "mxfp8_rceil": ("fp8", "unquantized"), "mxfp8_rceil_128": ("fp8", "unquantized")}
TIMEOUT = 120.0  # seconds: processes that share a GPU wait for each other's time slices
NAMES: list[str] = []


def case(function, name=None):
    name = name or function.__name__
    NAMES.append(name)

    def run(world):
        torch.cuda.set_device(world.rank % torch.cuda.device_count())
        torch.cuda.set_sync_debug_mode("default")
        function(rank=world.rank, size=world.size)
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()

    globals()[name] = run
    return run


def on_gpu(of: Problem) -> Problem:
    return Problem(*(value.cuda() if isinstance(value, torch.Tensor) else value for value in vars(of).values()))


def make(tokens: int, **options) -> Problem:
    """The same on every rank."""
    return on_gpu(problem(tokens, **{**DIMS, **options}))


def experts_of(of: Problem, rank: int, size: int, wire: str, engine, member: Member | None = None) -> ParallelExperts:
    out, dim = of.w13.shape[1:]
    layer = ParallelExperts(
        dim,
        out // 2,
        of.experts,
        member=member or member_of(dist.group.WORLD),
        wire=wire,
        engine=engine,
        recipe=of.recipe,
        device="cuda",
        dtype=of.x.dtype,
        bias=of.b2 is not None,
    )
    mine = share_of_experts(of, size, rank)
    with torch.no_grad():
        layer.w13.copy_(of.w13[mine])
        layer.w2.copy_(of.w2[mine])
        if of.b2 is not None:
            layer.b13.copy_(of.b13[mine])
            layer.b2.copy_(of.b2[mine])
    return layer


@contextlib.contextmanager
def no_waiting():
    """An operation that makes the host wait for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def call(layer: ParallelExperts, x, weights, ids):
    offs, slot_of, row_of = moxie.moe.route(ids, layer.num_experts)
    return layer(x, offs, slot_of=slot_of, row_of=row_of, top_k=ids.shape[1], weights=weights)


def step(layer: ParallelExperts, of: Problem, mine: slice) -> Grads:
    x, weights = leaves(of.x[mine], of.weights[mine])
    ids, dy = of.ids[mine], of.dy[mine]
    layer.zero_grad()
    y = call(layer, x, weights, ids)
    y.backward(dy)
    return grads_of(layer, y, x, weights)


def grads_of(layer: ParallelExperts, y, x, weights) -> Grads:
    bias = () if layer.b2 is None else (layer.b13.grad, layer.b2.grad)
    return Grads(y.detach(), x.grad, weights.grad, layer.w13.grad, layer.w2.grad, *bias)


@functools.cache
def alone() -> Member:
    """A group of this rank. All ranks call it first at the same place."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return member_of(groups[dist.get_rank()])


def over_fp8_wire(of: Problem) -> Grads:
    """All tokens and all experts on one rank, with tokens sent in FP8 by the engine c10d. At any number of ranks wgrad
    contracts the same FP8 tokens in the same order, so dw must be equal, bit for bit. How dw differs from that of one process
    without a wire, see wire_reference.py."""
    return step(experts_of(of, 0, 1, "fp8", "c10d", alone()), of, slice(None))


def compare(of: Problem, actual: Grads, expected: Grads, mine: slice, experts: slice, wire: str) -> None:
    for name in ("y", "x", "weights"):
        have, want = getattr(actual, name), getattr(expected, name)[mine]
        assert torch.equal(have, want), f"{name} differs: {decibels(have, want)} dB"
    reference = over_fp8_wire(of) if wire == "fp8" else expected
    for name in ("w13", "w2"):
        have, want = getattr(actual, name), getattr(reference, name)[experts]
        assert torch.equal(have, want), f"d{name} differs: {decibels(have, want)} dB"


def share_of_tokens(rank: int, counts: list[int]) -> slice:
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


def make_heavy_tailed(of: Problem) -> None:
    for x in (of.x, of.dy):
        x *= torch.exp(2 * torch.randn(x.shape, device=x.device)).to(x.dtype)


def exactness(recipe, wire, kind, rank, size):
    torch.manual_seed(1)
    counts = [TOKENS + 8 * i for i in range(size)]
    of = make(sum(counts), recipe=recipe, skewed=kind == "skewed")
    if kind == "heavy_tailed":
        make_heavy_tailed(of)
    dist.broadcast(of.x, 0), dist.broadcast(of.dy, 0)
    mine, experts = share_of_tokens(rank, counts), share_of_experts(of, size, rank)
    expected = one_process(of)
    rows = sum(counts) * of.top_k if kind == "skewed" else None
    layer = experts_of(of, rank, size, wire, Symmetric(max_rows=rows, timeout=TIMEOUT))
    step(layer, of, mine)  # makes the memory
    torch.cuda.synchronize()
    with no_waiting():
        actual = step(layer, of, mine)
    layer.check()
    compare(of, actual, expected, mine, experts, wire)
    other = step(experts_of(of, rank, size, wire, "c10d"), of, mine)
    are_equal(actual, other)


def are_equal(actual: Grads, of_c10d: Grads) -> None:
    for name, have in vars(actual).items():
        assert have is None or torch.equal(have, getattr(of_c10d, name)), f"{name} is not that of the engine c10d"


for _recipe, _wires in WIRES.items():
    for _wire in _wires:
        for _kind in ("normal", "heavy_tailed", "skewed"):
            case(
                lambda rank, size, of=(_recipe, _wire, _kind): exactness(*of, rank, size),
                f"the_bits_are_those_of_one_process_{_recipe}_{_wire}_{_kind}",
            )


@case
def odd_sizes_have_the_bits_of_one_process(rank, size):
    torch.manual_seed(2)
    counts = [0, 33, 1, 130][:size]
    of = make(sum(counts), recipe="mxfp8_rceil", dim=100, hidden=50, dtype=torch.float32) if sum(counts) else None
    if of is None:
        return
    mine = share_of_tokens(rank, counts)
    layer = experts_of(of, rank, size, "fp8", Symmetric(max_rows=sum(counts) * of.top_k, timeout=TIMEOUT))
    actual, expected = step(layer, of, mine), one_process(of)
    assert torch.equal(actual.y, expected.y[mine]), decibels(actual.y, expected.y[mine])
    assert torch.equal(actual.x, expected.x[mine]), decibels(actual.x, expected.x[mine])


@case
def a_graph_replays_with_changing_routing(rank, size):
    torch.manual_seed(3)
    counts = [TOKENS] * size
    first = make(sum(counts), recipe="mxfp8_rceil_128")
    mine, experts = share_of_tokens(rank, counts), share_of_experts(first, size, rank)
    layer = experts_of(first, rank, size, "fp8", Symmetric(max_rows=sum(counts) * first.top_k, timeout=TIMEOUT))
    x, weights = leaves(first.x[mine], first.weights[mine])
    ids, dy = first.ids[mine].clone(), first.dy[mine].clone()

    def forward_and_backward():
        x.grad = weights.grad = None
        layer.zero_grad()
        y = call(layer, x, weights, ids)
        y.backward(dy)
        return grads_of(layer, y, x, weights)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            forward_and_backward()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = forward_and_backward()
    for i in range(100):
        torch.manual_seed(100 + i)
        of = make(sum(counts), recipe="mxfp8_rceil_128", skewed=i % 7 == 0)
        with torch.no_grad():
            x.copy_(of.x[mine]), weights.copy_(of.weights[mine]), ids.copy_(of.ids[mine]), dy.copy_(of.dy[mine])
        graph.replay()
        if i % 10 == 0 or i == 99:
            of.w13, of.w2 = first.w13, first.w2
            compare(of, made, one_process(of), mine, experts, "fp8")
    layer.check()


@case
def random_steps_with_delays_do_not_hang(rank, size):
    torch.manual_seed(4)
    most = 24
    layers, problems = [], []
    for _ in range(2):
        of = make(most * size, recipe="mxfp8_rceil", dim=64, hidden=64)
        problems.append(of)
        layers.append(experts_of(of, rank, size, "fp8", Symmetric(max_rows=most * size * 3, max_tokens=most, timeout=TIMEOUT)))
    delays = torch.Generator().manual_seed(rank)
    expected, began = [one_process(of) for of in problems], time.monotonic()
    for i in range(STEPS):
        which = i % 2
        of, layer = problems[which], layers[which]
        if torch.rand((), generator=delays) < 0.2:
            torch.cuda._sleep(int(torch.randint(1, 2_000_000, (), generator=delays)))
        if torch.rand((), generator=delays) < 0.05:
            time.sleep(0.002)
        counts = torch.randint(0, most + 1, (size,)).tolist() if i % 50 else [most] * size
        mine = share_of_tokens(rank, counts)
        made = step(layer, of, mine)
        if i % 50 == 0:
            compare(of, made, expected[which], mine, share_of_experts(of, size, rank), "fp8")
    for layer in layers:
        layer.check()
    print(f"{STEPS} steps on rank {rank}: {time.monotonic() - began:.1f} s", flush=True)


@case
def one_small_step(rank, size):
    """Small enough for a memory checker."""
    torch.manual_seed(7)
    counts = [5 + rank for rank in range(size)]
    of = make(sum(counts), recipe="mxfp8_rceil_128", dim=128, hidden=128, experts=4, top_k=2)
    mine, experts = share_of_tokens(rank, counts), share_of_experts(of, size, rank)
    layer = experts_of(of, rank, size, "fp8", Symmetric(max_rows=sum(counts) * 2, timeout=300.0))
    actual, expected = step(layer, of, mine), one_process(of)
    layer.check()
    assert torch.equal(actual.y, expected.y[mine]) and torch.equal(actual.x, expected.x[mine])
    assert torch.equal(actual.w13, over_fp8_wire(of).w13[experts])


@case
def biases_have_the_bits_of_the_engine_c10d(rank, size):
    torch.manual_seed(8)
    counts = [TOKENS + 8 * i for i in range(size)]
    for recipe, dtype in (("mxfp8_rceil_128", torch.bfloat16), ("bf16", torch.bfloat16), ("mxfp8_rceil", torch.float32)):
        of = make(sum(counts), recipe=recipe, bias=True, dtype=dtype)
        wire = WIRES[recipe][0]
        mine, experts = share_of_tokens(rank, counts), share_of_experts(of, size, rank)
        layer = experts_of(of, rank, size, wire, Symmetric(max_rows=sum(counts) * of.top_k, timeout=TIMEOUT))
        step(layer, of, mine)  # makes the memory
        torch.cuda.synchronize()
        with no_waiting():
            actual = step(layer, of, mine)
        layer.check()
        expected = one_process(of)
        for name, rows in (("y", mine), ("x", mine), ("b13", experts)):
            have, want = getattr(actual, name), getattr(expected, name)[rows]
            assert torch.equal(have, want), f"{name} of {recipe} differs: {decibels(have, want)} dB"
        are_equal(actual, step(experts_of(of, rank, size, wire, "c10d"), of, mine))


@case
def dw_over_the_fp8_wire_is_that_of_rounded_tokens(rank, size):
    """Of one process whose x and dy were rounded to FP8 before. Its rowwise scales may be half of those on the wire, with
    elements twice as large: a product of powers of two, which changes no bit of a sum in f32."""
    torch.manual_seed(9)
    for recipe in ("mxfp8_rceil", "mxfp8_rceil_128"):
        for heavy_tailed in (False, True):
            of = make(TOKENS, recipe=recipe)
            if heavy_tailed:
                make_heavy_tailed(of)
            actual, expected = over_fp8_wire(of), one_process(of)
            rounded = one_process(with_rounded_tokens(of))
            for name in ("y", "x", "w13", "w2"):
                have, want = getattr(actual, name), getattr(rounded, name)
                assert torch.equal(have, want), f"{name} of {recipe} differs: {decibels(have, want)} dB"
            print(recipe, heavy_tailed, f"dw13 {decibels(actual.w13, expected.w13):.1f} dB without a wire", flush=True)


# ---- failures: each leaves memory behind that has failed, so they come last ---------------------------------------------------


def error_of(body) -> Exception | None:
    try:
        body()
    except Exception as error:  # the caller looks at it
        return error
    return None


def is_nan(made: Grads) -> bool:
    return all(bool(value.isnan().all()) for value in vars(made).values() if value is not None)


@case
def too_many_rows_are_nan_everywhere_and_an_error_in_the_next_call(rank, size):
    torch.manual_seed(5)
    counts = [TOKENS] * size
    of = make(sum(counts), recipe="mxfp8_rceil_128", skewed=True)
    mine = share_of_tokens(rank, counts)
    layer = experts_of(of, rank, size, "fp8", Symmetric(max_rows=100, timeout=TIMEOUT))
    assert is_nan(step(layer, of, mine))
    torch.cuda.synchronize()
    for error in (error_of(layer.check), error_of(lambda: step(layer, of, mine))):
        assert isinstance(error, RuntimeError) and "rank 0 got" in str(error) and "max_rows is 100" in str(error), error
    dist.barrier()
    layer = experts_of(of, rank, size, "fp8", Symmetric(max_rows=sum(counts) * 3, timeout=TIMEOUT))
    compare(of, step(layer, of, mine), one_process(of), mine, share_of_experts(of, size, rank), "fp8")


@case
def a_stalled_rank_is_named_within_the_timeout(rank, size):
    if size == 1:
        return
    torch.manual_seed(6)
    counts = [TOKENS] * size
    of = make(sum(counts), recipe="mxfp8_rceil_128")
    mine = share_of_tokens(rank, counts)
    layer = experts_of(of, rank, size, "fp8", Symmetric(max_rows=sum(counts) * 3, timeout=3.0))
    step(layer, of, mine)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == size - 1:
        time.sleep(8.0)
        made = step(layer, of, mine)
        assert is_nan(made)
        error = error_of(layer.check)
        assert isinstance(error, RuntimeError) and "has failed" in str(error), error
    else:
        began = time.monotonic()
        made = step(layer, of, mine)
        error = error_of(layer.check)
        took = time.monotonic() - began
        assert isinstance(error, RuntimeError), error
        assert f"no word from rank {size - 1}" in str(error) or "has failed" in str(error), error
        assert is_nan(made)
        print(f"rank {rank} raised after {took:.1f} s: {error}", flush=True)
    dist.barrier()


@case
def cpu_tensors_are_refused_on_every_rank(rank, size):
    of = problem(TOKENS * size)
    layer = ParallelExperts(
        160, 96, 8, member=member_of(dist.group.WORLD), engine="symmetric", recipe="mxfp8_rceil", dtype=torch.bfloat16
    )
    error = error_of(lambda: call(layer, of.x, of.weights, of.ids))
    assert isinstance(error, ValueError) and "takes CUDA tensors" in str(error), error
