"""The layer on a GPU never synchronizes with the host, and one CUDA graph serves every routing."""

import pytest
import torch

import moxie
import moxie.nn
from noise import BF16_STEP, E4M3_STEP, difference, rounded
from support import assert_same_bytes

pytestmark = pytest.mark.skipif(not (torch.cuda.is_available() and moxie.has_cuda()), reason="needs a GPU")

RECIPES = ("bf16", "mxfp8_rceil", "mxfp8_rceil_128")


def make(recipe: str, device: str = "cuda", collect_stats: bool = False):
    """Makes a layer and tokens, with the same values on every device."""
    torch.manual_seed(0)
    layer = moxie.nn.MoE(
        128,
        256,
        8,
        2,
        recipe=recipe,
        dtype=torch.bfloat16,
        shared_hidden_dim=128,
        balance="bias",
        score="sigmoid",
        collect_stats=collect_stats,
    )
    x = torch.randn(300, 128, dtype=torch.bfloat16)
    return layer.to(device), x.to(device).requires_grad_()


def step(layer, x, dy=None):
    y = layer(x)
    loss = y.float().square().sum() if dy is None else (y * dy).float().sum()
    return y, *torch.autograd.grad(loss + layer.loss, [x, *layer.parameters()])


@pytest.mark.parametrize("collect_stats", (False, True))
@pytest.mark.parametrize("recipe", (*RECIPES, "fp8_rowwise"))
def test_nothing_waits_for_the_gpu(recipe, collect_stats):
    layer, x = make(recipe, collect_stats=collect_stats)
    step(layer, x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(layer, x)
        layer.router.update_bias_()
        moxie.sqnr(layer.experts.stats)
        layer.experts.reset_stats_()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("collect_stats", (False, True))
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_graph_serves_every_routing(recipe, collect_stats):
    layer, x = make(recipe, collect_stats=collect_stats)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(layer, x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(layer, x)
    for seed in range(5):
        with torch.no_grad():
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        layer.router.reset_load_(), layer.experts.reset_stats_()
        graph.replay()
        results = [t.detach().clone() for t in (*captured, layer.router.load, layer.experts.stats)]
        layer.router.reset_load_(), layer.experts.reset_stats_()
        expected = [t.detach() for t in (*step(layer, x), layer.router.load, layer.experts.stats)]
        assert_same_bytes(results, expected, f"seed {seed}")
        assert layer.router.load.sum() == 600


def test_rows_of_tokens_are_never_in_memory():
    tokens, dim, top_k = 4096, 256, 4
    layer = moxie.nn.MoE(dim, 512, 8, top_k, device="cuda", dtype=torch.bfloat16)
    experts = layer.experts
    x = torch.randn(tokens, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    offs, slot_of, row_of = moxie.route(layer.router(x).ids, 8)

    def peak(forward) -> int:
        forward()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = forward()
        torch.cuda.synchronize()
        del y
        return torch.cuda.max_memory_allocated() - before

    fused = peak(lambda: experts(x, offs, slot_of=slot_of, row_of=row_of, top_k=top_k))
    by_steps = peak(lambda: experts(moxie.permute(x, slot_of, row_of, top_k), offs))
    assert by_steps - fused >= tokens * top_k * dim * 2


# How much products on a CPU and on a GPU differ, as a relative norm: f32 sums of at most 300 terms in different orders or, for
# Hopper's FP8 tensor cores, the 70 dB that gemm_sm90_test allows.
OF_PRODUCT = {"bf16": 2.0**-18, "mxfp8_rceil": 2.0**-18, "mxfp8_rceil_128": 10 ** (-70 / 20)}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_gpu_gives_the_results_of_the_cpu(recipe):
    (layer, x), (other, tokens) = make(recipe, collect_stats=True), make(recipe, "cpu", collect_stats=True)
    routing, expected = layer.router(x), other.router(tokens)
    # Results are comparable only if both devices choose the same experts. They do: the scores of the last chosen expert and of
    # the next one differ by at least 2^-16, while logits, f32 sums of 128 products, differ by about 2^-20 between devices.
    assert torch.equal(routing.ids.cpu(), expected.ids)
    assert difference(routing.weights, expected.weights) < 2**-18
    dy = torch.randn(300, 128, dtype=torch.bfloat16)
    quantized = [] if recipe == "bf16" else [E4M3_STEP]
    # Up to three products come before dh. h, a, da and dh are rounded between products. The output is rounded three times more:
    # as the rows of experts, as the sum of a token's rows, and after the shared expert is added.
    between = rounded(3 * OF_PRODUCT[recipe], BF16_STEP, BF16_STEP, *quantized, count=600 * 256)
    names = ["y", "dx", *(name for name, _ in layer.named_parameters())]
    results = zip(names, step(layer, x, dy.cuda()), step(other, tokens, dy), strict=True)
    for name, actual, expected in results:
        budget = rounded(between, BF16_STEP, BF16_STEP, BF16_STEP, count=actual.numel())
        # The weights of a token add up to 1, so their gradients are differences of similar numbers: twice the relative error.
        assert difference(actual, expected) < budget * (2 if name == "router.gate.weight" else 1), name
    assert torch.equal(layer.experts.stats[..., -1].cpu(), other.experts.stats[..., -1])
    decibels, expected = moxie.sqnr(layer.experts.stats).cpu(), moxie.sqnr(other.experts.stats)
    assert torch.equal(decibels.isinf(), expected.isinf())
    # The quantized values differ by at most 2^-9 between devices (two products and two roundings to bf16). The square of that is
    # 2^-8 of the noise, which is 30 dB below the signal; this changes the SQNR by 0.02 dB.
    assert ((decibels - expected)[expected.isfinite()].abs() < 0.1).all()
