"""On a GPU, forward and backward never synchronize with the host, and one CUDA graph serves all group sizes."""

import pytest
import torch

import moxie
from grouped_reference import gaussian, run
from support import assert_same_bytes, sizes_to_offs

pytestmark = pytest.mark.skipif(not (torch.cuda.is_available() and moxie.has_cuda()), reason="needs a GPU")

STEPS = ([300, 0, 150, 62], [0, 0, 512, 0], [1, 127, 128, 129], [100, 100, 100, 100])
ROWS = 512  # the groups of the last step have 400 rows, so 112 are in no group


def train_step(x, w13, w2, offs, bias, recipe, main_grad):
    """Runs grouped_mm with a bias and a main gradient, and expert_mlp, forward and backward."""
    y = moxie.grouped_mm(x, w13, offs, recipe=recipe, bias=bias, main_grad=main_grad)
    z = moxie.expert_mlp(x, w13, w2, offs, recipe=recipe)
    return y, z, *torch.autograd.grad(y.sum() * 0.5 + z.sum(), (x, w2, bias))


def tensors():
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=generator).bfloat16().cuda()
    x, w13, w2, bias = normal(ROWS, 256), normal(4, 256, 256), normal(4, 256, 128), normal(4, 256)
    return [t.requires_grad_() for t in (x, w13, w2)], bias.requires_grad_(), torch.zeros(4, 256, 256, device="cuda")


@pytest.mark.parametrize("recipe", moxie.recipe_names())
def test_nothing_waits_for_the_gpu(recipe):
    (x, w13, w2), bias, main_grad = tensors()
    offs = sizes_to_offs(STEPS[0], "cuda")
    train_step(x, w13, w2, offs, bias, recipe, main_grad)  # the first call may synchronize, for one-time set-up
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_step(x, w13, w2, offs, bias, recipe, main_grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("recipe", moxie.recipe_names())
def test_one_graph_serves_all_group_sizes(recipe):
    (x, w13, w2), bias, main_grad = tensors()
    offs = sizes_to_offs(STEPS[0], "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            train_step(x, w13, w2, offs, bias, recipe, main_grad)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = train_step(x, w13, w2, offs, bias, recipe, main_grad)
    for seed, sizes in enumerate(STEPS):
        with torch.no_grad():
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        offs.copy_(sizes_to_offs(sizes))
        main_grad.zero_()
        graph.replay()
        results = [t.detach().clone() for t in (*captured, main_grad)]
        main_grad.zero_()
        expected = [t.detach() for t in train_step(x, w13, w2, offs, bias, recipe, main_grad)] + [main_grad]
        assert_same_bytes(results, expected, f"groups of {sizes}")


@pytest.mark.parametrize("recipe", moxie.recipe_names())
def test_the_gpu_gives_the_results_of_the_cpu(recipe):
    problem = gaussian([300, 0, 1, 211], 256, 384, tail=9, bias="gn")
    for actual, expected in zip(run(problem.on("cuda"), recipe), run(problem, recipe)):
        scale = expected.float().abs().max().item()
        torch.testing.assert_close(actual.cpu().float(), expected.float(), rtol=2.0**-7, atol=2.0**-9 * scale)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="one way to multiply: Hopper's"
)
@pytest.mark.parametrize("groups", [5, 80])  # the wgrad kernel sorts groups by size only if they are few
def test_dw_of_a_group_does_not_depend_on_the_others(groups):
    n, k = 2048, 4608  # more tiles than the GPU has clusters, so that each cluster computes several
    generator = torch.Generator().manual_seed(groups)
    sizes = torch.randint(0, 1000 // groups, (groups,), generator=generator)
    sizes[groups // 2] = 0
    recipe = moxie.Recipe.from_name("mxfp8_rceil_128")

    def wgrad(dy, x, offs):
        quantized = lambda t, colwise: moxie.quantize_both(
            t, offs=offs, rowwise_block=recipe.activations, colwise_block=colwise, rule=recipe.rule, scale_layout="quads"
        )[2:]
        return moxie.grouped_wgrad(
            *quantized(dy, recipe.wgrad_dy),
            *quantized(x, recipe.wgrad_x),
            len(x),
            offs,
            recipe="mxfp8_rceil_128",
            scale_layout="quads",
        )

    dy, x = (torch.randn(int(sizes.sum()), width, generator=generator).bfloat16().cuda() for width in (n, k))
    together = wgrad(dy, x, sizes_to_offs(sizes.tolist(), "cuda"))
    for dw, size, *rows in zip(together, sizes.tolist(), dy.split(sizes.tolist()), x.split(sizes.tolist())):
        assert_same_bytes([dw], [wgrad(*rows, sizes_to_offs([size], "cuda"))[0]], f"group of {size}")
