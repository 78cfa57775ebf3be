"""Cases that test_torchtitan.py runs on two ranks (ranks.py). Each gives the same tokens and weights to TorchTitan's routed
experts with TorchTitan's token dispatcher and with Moxie's."""

import math

import torch
import torch.distributed as dist
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

import titan_cpu
from moxie.torchtitan import MoxieTokenDispatcher
from moxie.torchtitan.replace import quantized_experts

set_spmd_backend("partial_dtensor")  # the backend of the trainer tests in titan_cpu.py

DIM, HIDDEN, EXPERTS, TOP_K, TOKENS = 160, 96, 8, 3, 40
NAMES: list[str] = []


def case(function):
    NAMES.append(function.__name__)
    return function


def block(world, dispatcher, recipe=""):
    """Builds TorchTitan's routed experts, of which this rank holds its share. Returns the module, and the group that counts the
    bytes it sends."""
    experts = GroupedExperts.Config(dim=DIM, hidden_dim=HIDDEN, num_experts=EXPERTS // world.size)
    config = RoutedExperts.Config(
        inner_experts=quantized_experts(experts, recipe) if recipe else experts, token_dispatcher=dispatcher
    )
    module = config.build()
    torch.manual_seed(1)
    own = slice(world.rank * EXPERTS // world.size, (world.rank + 1) * EXPERTS // world.size)
    with torch.no_grad():
        for name, shape in (("w1_EFD", (HIDDEN, DIM)), ("w2_EDF", (DIM, HIDDEN)), ("w3_EFD", (HIDDEN, DIM))):
            parameter = getattr(module.inner_experts, name)
            parameter.data = torch.randn(EXPERTS, *shape).div(10).bfloat16()[own].clone()
    mesh = titan_cpu.CountedMesh.of(dist.group.WORLD)
    module.token_dispatcher.wire_meshes(ep_mesh=mesh)
    return module, mesh


def stock():
    return AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K)


def ours(**options):
    return MoxieTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K, **options)


def inputs(world, tokens=TOKENS):
    torch.manual_seed(2 + world.rank)
    x, dy = torch.randn(1, tokens, DIM).bfloat16(), torch.randn(1, tokens, DIM).bfloat16()
    scores = torch.randn(1, tokens, EXPERTS).sigmoid()
    ids = scores.topk(TOP_K, dim=-1).indices
    return x, scores.gather(-1, ids), ids, dy


def step(module, x, scores, ids, dy):
    """Runs forward and backward. Returns y and the gradients of x, of the scores and of the experts' weights."""
    x, scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
    y = module(x, scores, ids, counts)
    (y * dy).sum().backward()
    return [y.detach(), x.grad, scores.grad, *(parameter.grad for parameter in module.inner_experts.parameters())]


def decibels(actual, expected):
    noise = (actual.double() - expected.double()).norm().item()
    return math.inf if noise == 0 else 20 * math.log10(max(expected.double().norm().item(), 1e-300) / noise)


def compare(world, dispatcher, least, recipe="", tokens=TOKENS):
    """Asserts that the results with Moxie's dispatcher are at least `least` dB close to those with TorchTitan's. Returns the
    bytes that each sent to other ranks."""
    given = inputs(world, tokens)
    expected_module, expected_mesh = block(world, stock())
    module, mesh = block(world, dispatcher, recipe)
    expected, actual = step(expected_module, *given), step(module, *given)
    for name, one, other in zip(("y", "dx", "dscores", "dw1", "dw2", "dw3"), actual, expected):
        assert one.dtype == other.dtype and one.shape == other.shape, name
        assert one.numel() == 0 or decibels(one, other) >= least, f"{name}: {decibels(one, other):.1f} dB"
    return sum(mesh.sent), sum(expected_mesh.sent)


@case
def an_unquantized_wire_differs_by_the_rounding_of_sums_alone(world):
    # TorchTitan rounds each weighted row and each partial sum to bf16, so its sums of 3 rows are about 50 dB from Moxie's.
    sent, of_titan = compare(world, ours(wire="unquantized"), least=45)
    assert sent < of_titan


@case
def fp8_on_the_wire_is_as_exact_as_fp8_and_sends_fewer_bytes(world):
    # An e4m3 element is off by up to 2^-4 of itself, evenly distributed: a mean error sqrt(3) * 2^4 times smaller, 28.9 dB. dw
    # has two such factors, which costs 3 dB more, and elements that are subnormal beside a block's largest cost a little.
    for recipe in ("mxfp8_rceil", "mxfp8_rceil_128"):
        sent, of_titan = compare(world, ours(recipe=recipe), least=25)
        print(f"{recipe}: {sent / of_titan:.3f} of TorchTitan's bytes", flush=True)
        assert sent < 0.75 * of_titan


@case
def fused_experts_take_the_tokens_and_have_the_bits_of_one_process(world):
    recipe = "mxfp8_rceil_128"
    sent, of_titan = compare(world, ours(experts_take_tokens=True), least=20, recipe=recipe)
    assert sent < 0.75 * of_titan
    # Compute the same in one process, which gets the tokens of all ranks and holds all experts.
    x, scores, ids, dy = inputs(world)
    everyone = [[torch.zeros_like(part) for _ in range(world.size)] for part in (x, scores, ids, dy)]
    for all_of_them, part in zip(everyone, (x, scores, ids, dy)):
        dist.all_gather(all_of_them, part.contiguous())
    whole = [torch.cat(parts, dim=1) for parts in everyone]
    solo = type(world)(0, 1, world.folder)
    alone, _ = block(solo, ours(experts_take_tokens=True), recipe)
    alone.token_dispatcher.wire_meshes(ep_mesh=None)
    module, _ = block(world, ours(experts_take_tokens=True), recipe)
    expected, actual = step(alone, *whole), step(module, x, scores, ids, dy)
    mine = slice(world.rank * TOKENS, (world.rank + 1) * TOKENS)
    assert torch.equal(actual[0], expected[0][:, mine]), "y differs"
    assert torch.equal(actual[1], expected[1][:, mine]), "dx differs"


@case
def rows_of_experts_are_in_order_of_rank_and_token(world):
    dispatcher = ours(wire="unquantized").build()
    dispatcher.wire_meshes(ep_mesh=titan_cpu.CountedMesh.of(dist.group.WORLD))
    _, scores, ids, _ = inputs(world)
    numbers = (torch.arange(TOKENS) + world.rank * TOKENS).float().unsqueeze(1).expand(-1, 16).contiguous()
    rows, counts, _ = dispatcher.dispatch(numbers, scores[0], ids[0], None)
    everyone = [torch.zeros_like(ids) for _ in range(world.size)]
    dist.all_gather(everyone, ids.contiguous())
    all_ids = torch.cat(everyone, dim=1)[0]
    local = EXPERTS // world.size
    expected = [(all_ids == expert).any(1).nonzero().flatten() for expert in range(world.rank * local, (world.rank + 1) * local)]
    assert counts.tolist() == [len(tokens) for tokens in expected]
    assert rows[:, 0].tolist() == torch.cat(expected).tolist()


@case
def a_rank_without_tokens_takes_part(world):
    for fused in (False, True):
        recipe = "mxfp8_rceil" if fused else ""
        compare(world, ours(recipe="mxfp8_rceil", experts_take_tokens=fused), 20, recipe, TOKENS if world.rank else 0)


@case
def wire_fp8_with_experts_in_bf16_is_refused_before_anything_is_sent(world):
    module, mesh = block(world, ours(wire="fp8", experts_take_tokens=True), "bf16")
    try:
        step(module, *inputs(world))
    except ValueError as error:
        assert "wire 'fp8' takes recipes" in str(error), error
    else:
        raise AssertionError("it was taken")
    assert not mesh.sent


@case
def a_compiled_dispatch_says_what_to_do(world):
    dispatcher = ours().build()
    dispatcher.wire_meshes(ep_mesh=titan_cpu.CountedMesh.of(dist.group.WORLD))
    x, scores, ids, _ = inputs(world)
    try:
        torch.compile(dispatcher.dispatch, backend="eager", fullgraph=True)(x[0], scores[0], ids[0], None)
    except Exception as error:  # what torch makes of it
        assert "train without --compile.enable" in str(error), error
    else:
        raise AssertionError("it was compiled")
