"""The state of an MoE layer: weights, state dicts, the load of each expert, and statistics of quantization errors."""

import copy
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import moxie
import moxie.nn
from moxie.stats import PARTS, STATS
from support import as_bytes

RECIPES = ("bf16", "fp8_rowwise", "mxfp8_rceil", "mxfp8_floor", "mxfp8_rceil_wgrad_with_hp", "mxfp8_rceil_128")


# ---- state dicts ------------------------------------------------------------------------------------------------------------


def test_the_names_of_the_state_dict_are_those_of_the_cpp_module():
    layer = moxie.nn.MoE(32, 48, 5, 2, balance="bias", shared_hidden_dim=16, collect_stats=True, weight_cache=True)
    layer(torch.randn(20, 32))
    # tests/torch/moe_test.cc has the same ones.
    assert list(layer.state_dict()) == [
        "router.bias",
        "router.gate.weight",
        "experts.w13",
        "experts.w2",
        "shared.experts.w13",
        "shared.experts.w2",
    ]


def test_experts_that_were_pickled_before_keep_was_a_choice_keep_h():
    experts = moxie.nn.GroupedExperts(64, 32, 2)
    del experts.__dict__["keep"]
    twin = pickle.loads(pickle.dumps(experts))
    x, offs = torch.randn(5, 64), torch.tensor([2, 5], dtype=torch.int32)
    assert twin.keep == "h" and torch.equal(twin(x, offs), experts(x, offs))


def test_a_layer_on_meta_has_the_shapes_of_a_real_one():
    layer = moxie.nn.MoE(32, 48, 5, 2, balance="loss", shared_hidden_dim=16, collect_stats=True, device="meta")
    x = torch.randn(4, 20, 32, device="meta", requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == (4, 20, 32) and layer.experts.w13.grad.shape == (5, 96, 32)


def test_a_layer_made_on_meta_starts_from_its_reset_parameters(device):
    layer = moxie.nn.MoE(32, 48, 5, 2, balance="bias", shared_hidden_dim=16, device="meta").to_empty(device=device)
    for module in layer.modules():
        for buffer in module.buffers(recurse=False):
            buffer.fill_(7)
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(buffer.abs().sum() == 0 for buffer in layer.buffers())
    assert layer(torch.randn(20, 32, device=device)).isfinite().all()


def test_a_replaced_parameter_is_the_one_that_is_refreshed():
    layer, other = (moxie.nn.MoE(64, 96, 4, 2, weight_cache=True, shared_hidden_dim=32) for _ in range(2))
    layer.load_state_dict(other.state_dict(), assign=True)
    layer.refresh_()
    x = torch.randn(20, 64)
    assert torch.equal(layer(x), other(x))


def test_a_layer_can_be_copied_after_a_forward_pass():
    layer = moxie.nn.MoE(64, 96, 4, 2, balance="loss")
    x = torch.randn(20, 64)
    y = layer(x)
    assert layer.loss.requires_grad
    assert torch.equal(copy.deepcopy(layer)(x), y)


# ---- loading weights --------------------------------------------------------------------------------------------------------


def test_weights_load_from_the_common_layouts():
    experts = moxie.nn.GroupedExperts(8, 6, 3, weight_cache=True)
    w1, w3, w2 = torch.randn(3, 6, 8), torch.randn(3, 6, 8), torch.randn(3, 8, 6)
    offs = torch.tensor([2, 2, 5], dtype=torch.int32)
    x = torch.randn(5, 8)
    experts.load_weights_(w1=w1, w2=w2, w3=w3)
    expected = experts(x, offs)
    assert torch.equal(experts.w13, torch.cat([w1, w3], 1))
    experts.load_weights_(w1=list(w1), w2=list(w2), w3=list(w3))
    assert torch.equal(experts(x, offs), expected)
    experts.load_weights_(w13=torch.cat([w1, w3], 1).mT, w2=w2.mT, transposed=True)
    assert torch.equal(experts(x, offs), expected)
    assert as_bytes(experts.cache13.qdata).equal(as_bytes(moxie.quantize_weights(experts.w13.detach())[0]))
    with pytest.raises(ValueError, match=r"w2 must be \[3, 8, 6\], got \[3, 6, 8\] \(is it transposed\?\)"):
        experts.load_weights_(w2=w2.mT)
    with pytest.raises(ValueError, match="give w1 and w3 together"):
        experts.load_weights_(w1=w1)


@pytest.mark.parametrize(
    "weights, message",
    [
        ({"w1": (3, 6, 8)}, "give w1 and w3 together, or w13 alone"),
        ({"w1": (3, 6, 8), "w3": (3, 6, 8), "w13": (3, 12, 8)}, "give w1 and w3 together, or w13 alone"),
        ({"w1": (3, 7, 8), "w3": (3, 5, 8)}, r"w1 must be \[3, 6, 8\], got \[3, 7, 8\]"),
        ({"w13": (12, 8)}, r"w13 must be a matrix per expert, got \[12, 8\]"),
        ({"w13": (3, 12, 8), "w2": (3, 6, 8)}, r"w2 must be \[3, 8, 6\], got \[3, 6, 8\] \(is it transposed\?\)"),
    ],
)
def test_nothing_is_loaded_where_one_of_the_weights_does_not_fit(weights, message):
    experts = moxie.nn.GroupedExperts(8, 6, 3)
    before = experts.w13.detach().clone()
    with pytest.raises(ValueError, match="GroupedExperts.load_weights_: " + message):
        experts.load_weights_(**{name: torch.randn(shape) for name, shape in weights.items()})
    assert torch.equal(experts.w13, before)


def test_a_recipe_that_quantizes_nothing_has_nothing_to_cache():
    layer = moxie.nn.MoE(32, 48, 5, 2, recipe="bf16", weight_cache=True)
    layer.refresh_()
    assert layer.experts.cache13 is None and layer(torch.randn(3, 32)).shape == (3, 32)


# ---- what is counted --------------------------------------------------------------------------------------------------------


def test_load_counts_training_alone_and_the_bias_stays_f32():
    router = moxie.nn.Router(8, 4, 2, balance="bias")
    router.eval()(torch.randn(5, 8))
    assert router.load.sum() == 0
    router.train()(torch.randn(5, 8))
    assert router.load.sum() == 10
    router.bias.fill_(0.3)
    assert router.bfloat16().bias.dtype == torch.float32 and router.bias[0] == torch.tensor(0.3)


def test_checkpointing_gives_the_same_bytes(device):
    layer = moxie.nn.MoE(64, 96, 4, 2, device=device, dtype=torch.bfloat16)
    x = torch.randn(30, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    leaves = [x, *layer.parameters()]
    expected = torch.autograd.grad(layer(x).square().sum(), leaves)
    again = checkpoint(layer, x, use_reentrant=False)
    for a, e in zip(torch.autograd.grad(again.square().sum(), leaves), expected):
        assert torch.equal(a, e)


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_a_checkpoint_counts_once(device, use_reentrant):
    layer = moxie.nn.MoE(64, 96, 4, 2, device=device, dtype=torch.bfloat16, collect_stats=True)
    x = torch.randn(30, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    layer(x).square().sum().backward()
    load, stats = layer.router.load.clone(), layer.experts.stats.clone()
    assert load.sum() == 60 and stats[0, :, -1].tolist() == [60 * 64, 4 * 192 * 64] * 2 + [60 * 192] * 2
    layer.router.reset_load_(), layer.experts.reset_stats_()
    checkpoint(layer, x, use_reentrant=use_reentrant).square().sum().backward()
    assert torch.equal(layer.router.load, load) and torch.equal(layer.experts.stats, stats)


def test_a_compiled_checkpoint_counts_once(device):
    layer = moxie.nn.MoE(64, 96, 4, 2, device=device, dtype=torch.bfloat16, collect_stats=True, balance="bias")
    x = torch.randn(30, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    torch.compile(lambda x: checkpoint(layer, x, use_reentrant=False), fullgraph=True)(x).sum().backward()
    assert layer.router.load.sum() == 60
    assert layer.experts.stats[1, :, -1].tolist() == [60 * 96, 4 * 96 * 64] * 2 + [60 * 64] * 2


# ---- statistics -------------------------------------------------------------------------------------------------------------


def expected_stats(x, offs, recipe, part):
    """Computes in f64, from the quantizers' results, the statistics that the op must give."""
    recipe = moxie.Recipe.from_name(recipe)
    wide = x.double()
    if recipe.scaling == "none" or (recipe.wgrad_with_hp and part in ("x_t", "dy_t")):
        decoded, limit = x.bfloat16().double(), None
    elif recipe.scaling == "row":
        rowwise = not part.endswith("_t")
        qdata, scale = (moxie.quantize_per_row if rowwise else moxie.quantize_per_col)(x, offs=offs)
        if rowwise:
            decoded, limit = qdata.double() * scale.double().unsqueeze(-1), scale.double().unsqueeze(-1) * 448
        elif x.dim() == 3:
            decoded, limit = (qdata.double() * scale.double().unsqueeze(-1)).mT, (scale.double() * 448).unsqueeze(-2)
        else:  # in the colwise form, each group of rows is padded to a multiple of 16
            decoded, limit, begin, start = torch.zeros_like(wide), torch.full_like(wide, torch.inf), 0, 0
            for g, end in enumerate(offs.tolist()):
                factor = scale[g].double()
                decoded[begin:end] = qdata[:, start : start + end - begin].double().t() * factor
                limit[begin:end] = 448 * factor
                begin, start = end, start + -(-(end - begin) // 16) * 16
    else:
        blocks = {
            "x": recipe.activations,
            "dy": recipe.activations,
            "w": recipe.weights,
            "x_t": recipe.wgrad_x,
            "dy_t": recipe.wgrad_dy,
        }
        high = recipe.weights.split("x")
        blocks["w_t"] = f"{high[1]}x1" if high[0] == "1" else recipe.weights
        form = "colwise" if part.endswith("_t") else "rowwise"
        options = {"offs": offs, "block": blocks[part]}
        qdata, scale = getattr(moxie, "quantize_" + form)(x, rule=recipe.rule, **options)
        rows = (x.shape[-2],) if form == "colwise" else ()
        decode = lambda scale: getattr(moxie, "dequantize_" + form)(qdata, scale, *rows, dtype=torch.float32, **options).double()
        ones = torch.full_like(scale.view(torch.uint8), 127).view(torch.float8_e8m0fnu)
        decoded = decode(scale)
        limit = torch.where(decode(ones).abs() == 448, decoded.abs(), torch.inf)
    covered = torch.ones_like(wide, dtype=torch.bool)
    if offs is not None:
        covered[offs[-1] :] = False
    wide, decoded = wide[covered], decoded[covered]
    clipped = 0 if limit is None else (wide.abs() > limit.expand(x.shape)[covered] * 464 / 448).sum()
    return [wide.square().sum(), (wide - decoded).square().sum(), ((wide != 0) & (decoded == 0)).sum(), clipped, wide.numel()]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_statistics_are_of_the_form_that_a_pass_contracts(device, recipe, part):
    shape = (3, 70, 96) if part.startswith("w") else (70, 96)
    x = torch.randn(shape, device=device) * 2.0 ** torch.randint(-12, 13, (*shape[:-1], 1), device=device)
    offs = None if part.startswith("w") else torch.tensor([9, 9, 60], dtype=torch.int32, device=device)
    actual = moxie.quantization_stats(x, offs, recipe=recipe, part=part)
    expected = torch.tensor([float(value) for value in expected_stats(x, offs, recipe, part)], dtype=torch.float64)
    assert torch.allclose(actual.cpu(), expected, rtol=1e-6, atol=0), (dict(zip(STATS, actual.tolist())), expected)
    assert torch.equal(actual[2:].cpu(), expected[2:])


@pytest.mark.parametrize("recipe", RECIPES)
def test_statistics_count_what_a_recipe_loses(device, recipe):
    x = torch.randn(40, 256, device=device)
    x[3, 5] = 2.0**-60  # far smaller than the rest of its block, so it is flushed to 0
    signal, noise, flushed, clipped, count = moxie.quantization_stats(x, recipe=recipe).tolist()
    assert count == x.numel() and abs(signal - x.double().square().sum().item()) < 1e-6 * signal
    assert 0 < noise < signal * 10**-2.5
    assert flushed == (0 if recipe == "bf16" else 1)
    assert (clipped > 0) == (recipe == "mxfp8_floor")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("compiled", (False, True))
def test_a_layer_adds_up_statistics_and_gives_the_same_results(device, recipe, compiled):
    if compiled and recipe != "mxfp8_rceil_128":
        pytest.skip("one recipe is enough to see that a graph holds it")
    layer = moxie.nn.MoE(64, 96, 4, 2, recipe=recipe, device=device, dtype=torch.bfloat16, shared_hidden_dim=32)
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    x = torch.randn(30, 64, device=device, dtype=torch.bfloat16)
    dy = torch.randn(30, 64, device=device, dtype=torch.bfloat16)

    def step():
        y = run(x)
        return y, *torch.autograd.grad(y, list(layer.parameters()), dy)

    expected = step()
    assert layer.experts.stats.abs().sum() == 0
    layer.experts.collect_stats = layer.shared.experts.collect_stats = True
    assert all(torch.equal(a, e) for a, e in zip(step(), expected))
    once = layer.experts.stats.clone()
    assert (moxie.sqnr(once) > 25).all() and (moxie.sqnr(layer.shared.experts.stats) > 25).all()
    step()
    assert torch.equal(layer.experts.stats, 2 * once)
    assert torch.equal(layer.shared.experts.stats[1, 4], 2 * moxie.quantization_stats(dy, recipe=recipe, part="dy"))
    layer.float()
    assert layer.experts.stats.dtype == torch.float64 and layer.bfloat16().experts.stats.dtype == torch.float64
    layer.experts.reset_stats_()
    assert layer.experts.stats.abs().sum() == 0 and "stats" not in "".join(layer.state_dict())


def test_statistics_under_autocast_are_of_what_is_multiplied(device):
    layer = moxie.nn.MoE(64, 96, 4, 2, device=device, collect_stats=True, recipe="bf16")
    x = torch.randn(30, 64, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        layer(x)
    assert moxie.sqnr(layer.experts.stats[0, 0]) == torch.inf  # x was rounded before


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: moxie.quantization_stats(torch.zeros(3, 4), recipe="bf16", part="z"),
            "quantization_stats: part must be x, w, x_t, w_t, dy or dy_t, got 'z'",
        ),
        (
            lambda: moxie.quantization_stats(torch.zeros(3, 4), recipe="bf16", part="w"),
            r"quantization_stats: x must be \[groups, n, k\] for this part, got 2 dims",
        ),
        (
            lambda: moxie.quantization_stats(torch.zeros(1, 3, 4), torch.tensor([3], dtype=torch.int32), recipe="bf16"),
            "quantization_stats: offs are for tokens, and this part is w",
        ),
        (lambda: moxie.quantization_stats(torch.zeros(3, 4), recipe="fp4"), "quantization_stats: there is no recipe 'fp4'"),
        (
            lambda: torch.ops.moxie.grouped_mm.stats(torch.zeros(3, 4), torch.zeros(1, 4, 4), torch.zeros(5, 5).double()),
            r"grouped_mm: stats must be \[6, 5\], got \[5, 5\]",
        ),
        (
            lambda: torch.ops.moxie.grouped_mm.stats(torch.zeros(3, 4), torch.zeros(1, 4, 4), torch.zeros(6, 5)),
            "grouped_mm: stats must be torch.float64, got torch.float32",
        ),
    ],
)
def test_a_bad_call_says_the_op_the_rule_and_the_value(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
