"""The layer on a GPU: no result is waited for, and one captured graph serves every routing."""

import pytest
import torch

import moxie
import moxie.nn
from support import assert_same_bytes

pytestmark = pytest.mark.skipif(not (torch.cuda.is_available() and moxie.has_cuda()), reason="needs a GPU")

RECIPES = ("bf16", "mxfp8_rceil", "mxfp8_rceil_128")


def make(recipe: str):
    torch.manual_seed(0)
    layer = moxie.nn.MoE(128, 256, 8, 2, recipe=recipe, device="cuda", dtype=torch.bfloat16, shared_hidden_dim=128,
                         balance="bias", score="sigmoid")
    return layer, torch.randn(300, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def step(layer, x):
    y = layer(x)
    return y, *torch.autograd.grad(y.square().sum() + layer.loss, [x, *layer.parameters()])


@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_waits_for_the_gpu(recipe):
    layer, x = make(recipe)
    step(layer, x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(layer, x)
        layer.router.update_bias_()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_graph_serves_every_routing(recipe):
    layer, x = make(recipe)
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
        graph.replay()
        results = [t.detach().clone() for t in captured]
        assert_same_bytes(results, [t.detach() for t in step(layer, x)], f"seed {seed}")


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_gpu_gives_the_results_of_the_cpu(recipe):
    layer, x = make(recipe)
    other = moxie.nn.MoE(128, 256, 8, 2, recipe=recipe, dtype=torch.bfloat16, shared_hidden_dim=128, balance="bias",
                         score="sigmoid")
    other.load_state_dict(layer.state_dict())
    for actual, expected in zip(step(layer, x), step(other, x.detach().cpu().requires_grad_())):
        expected = expected.float()
        noise = (actual.cpu().float() - expected).norm() / expected.norm()
        assert noise < 2**-5  # a token between two experts may go to the other one
