"""expert_mlp with biases, gpt-oss's activation, and weights stored in other layouts."""

import itertools

import pytest
import torch
import torch._dynamo

import moxie
from support import assert_same_bytes, sizes_to_offs

RECIPES = moxie.recipe_names()
EXPERTS, DIM, HIDDEN, TOKENS, TOP_K = 4, 96, 40, 50, 2
ACTIVATIONS = ("swiglu", "clamped_swiglu")
GPT_OSS = {"activation": "clamped_swiglu", "w13_layout": "interleaved"}
NAMES = ("y", "dx", "dw13", "dw2", "db13", "db2", "dweights")


def interleave(w: torch.Tensor) -> torch.Tensor:
    """Converts w13 from the concatenated to the interleaved layout."""
    gate, up = w.chunk(2, 1)
    return torch.stack([gate, up], 2).flatten(1, 2)


def parameters(device: str, dtype=torch.bfloat16, groups: int = EXPERTS):
    """Returns w13, w2, b13 and b2, so large that some gates and ups are clamped."""
    normal = lambda *shape: torch.randn(shape).to(dtype).to(device)
    return (
        normal(groups, 2 * HIDDEN, DIM) * 4 * DIM**-0.5,
        normal(groups, DIM, HIDDEN) * HIDDEN**-0.5,
        normal(groups, 2 * HIDDEN),
        normal(groups, DIM),
    )


def routed(device: str, dtype=torch.bfloat16, ids=None, tokens: int = TOKENS):
    """Returns x, weights, dy and offs, slot_of, row_of. No token chooses expert 1."""
    if ids is None:
        ids = moxie.top_k(torch.randn(tokens, EXPERTS).index_fill(1, torch.tensor([1]), -9), TOP_K)
    x, dy = (torch.randn(tokens, DIM).to(dtype).to(device) for _ in range(2))
    weights = torch.rand(tokens, TOP_K, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    return (x, weights.to(device), dy), tuple(t.to(device) for t in moxie.route(ids, EXPERTS))


def gradients(y, dy, *leaves):
    y.backward(dy.to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def leaves_of(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def calculus(x, w13, w2, b13, b2, weights, dy, offs, slot_of, activation):
    """Computes the result and all gradients in f64 with torch's autograd. w13 is concatenated."""
    leaves = leaves_of(*(t.double() for t in (x, w13, w2, b13, b2, weights)))
    x, w13, w2, b13, b2, weights = leaves
    y, begin = torch.zeros_like(x), 0
    for expert, end in enumerate(offs.tolist()):
        slots = slot_of[begin:end].long()
        gate, up = (x[slots // TOP_K] @ w13[expert].T + b13[expert]).chunk(2, 1)
        if activation == "swiglu":
            a = torch.nn.functional.silu(gate) * up
        else:
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            a = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        rows = (a @ w2[expert].T + b2[expert]) * weights.flatten()[slots].unsqueeze(1)
        y = y.index_add(0, slots // TOP_K, rows)
        begin = end
    y, dx, dw13, dw2, db13, db2, dweights = gradients(y, dy.double(), *leaves)
    return dict(zip(NAMES, (y, dx, dw13, dw2, db13, db2, dweights)))


def by_node(x, w13, w2, b13, b2, weights, dy, offs, slot_of, row_of, **options):
    leaves = leaves_of(x, w13, w2, b13, b2, weights)
    x, w13, w2, b13, b2, weights = leaves
    route = {"slot_of": slot_of, "row_of": row_of, "top_k": TOP_K, "weights": weights}
    y = moxie.expert_mlp(x, w13, w2, offs, b13=b13, b2=b2, **route, **options)
    return dict(zip(NAMES, gradients(y, dy, *leaves)))


# ---- the model's own formulas ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_layer_of_a_model_is_close_to_calculus(recipe, activation, device):
    (x, weights, dy), route = routed(device)
    w13, *others = parameters(device)
    # Small weights, because rounding could move a gate near the clamp's limit across it, which changes its gradient.
    tensors = (w13 * 0.3, *others)
    expected = calculus(x, *tensors, weights, dy, *route[:2], activation)
    actual = by_node(x, *tensors, weights, dy, *route, recipe=recipe, activation=activation)
    for name in NAMES:
        noise = (actual[name].double() - expected[name]).norm() / expected[name].norm()
        # An operand's mean relative error is 2^-9.6 in bf16 and 2^-5.4 in e4m3, and a gradient adds up the errors of several
        # operands.
        assert noise < (2.0**-6 if recipe == "bf16" else 2.0**-3), (name, noise)
    assert all((actual[name][1] == 0).all() for name in ("dw13", "dw2", "db13", "db2")), "an expert without rows"


@pytest.mark.parametrize("activation, layout", itertools.product(ACTIVATIONS, ("concatenated", "interleaved")))
def test_in_f64_the_gradients_are_those_of_calculus(activation, layout, device):
    (x, weights, _), (offs, slot_of, row_of) = routed(device, torch.float64, tokens=7)
    x = x[:7]
    tensors = leaves_of(x, *parameters(device, torch.float64), weights)

    def function(x, w13, w2, b13, b2, weights):
        route = {"slot_of": slot_of, "row_of": row_of, "top_k": TOP_K, "weights": weights}
        options = {"recipe": "identity", "activation": activation, "w13_layout": layout}
        return moxie.expert_mlp(x, w13, w2, offs, b13=b13, b2=b2, **route, **options)

    assert torch.autograd.gradcheck(function, tensors, nondet_tol=0.0, fast_mode=True)


def test_what_b2_adds_to_the_gradient_of_weights_is_its_product_with_dy(device):
    (x, weights, dy), route = routed(device)
    w13, w2, b13, b2 = parameters(device)
    with_bias = by_node(x, w13, w2, b13, b2, weights, dy, *route)["dweights"].double()
    without = by_node(x, w13, w2, b13, torch.zeros_like(b2), weights, dy, *route)["dweights"].double()
    expert = torch.searchsorted(route[0], route[2], right=True).view(TOKENS, TOP_K)
    terms = dy.double().unsqueeze(1) * b2.double()[expert]
    # Rounding errors of a sum of DIM products in f32, and of one more addition.
    bound = terms.abs().sum(-1) * DIM * 2.0**-24 + (with_bias.abs() + without.abs()) * 2.0**-23
    assert ((with_bias - without - terms.sum(-1)).abs() <= bound).all()


@pytest.mark.parametrize("sizes", ([37, 0, 1, 12], [0, 0, 50, 0], [1, 1, 1, 1]), ids=str)
def test_gradients_of_biases_are_sums_over_the_rows_of_a_group(sizes, device):
    w13, w2, b13, b2 = parameters(device)
    rows = sum(sizes) + 5  # the last five rows are in no group
    x, dy = (torch.randn(rows, DIM, device=device).bfloat16() for _ in range(2))
    dy[-1] = float("nan")
    b2_leaf, b13_leaf = leaves_of(b2, b13)
    y = moxie.expert_mlp(x, w13, w2, sizes_to_offs(sizes, device), b13=b13_leaf, b2=b2_leaf)
    assert (y[-5:] == 0).all()
    y.backward(dy)
    groups = dy[:-5].double().split(sizes)
    expected = torch.stack([group.sum(0) for group in groups])
    magnitude = torch.stack([group.abs().sum(0) for group in groups])
    # Rounding errors of a sum in f32, and of the result's rounding to bf16.
    assert ((b2_leaf.grad.double() - expected).abs() <= magnitude * max(sizes) * 2.0**-24 + expected.abs() * 2.0**-8).all()
    assert b13_leaf.grad.isfinite().all() and (b13_leaf.grad[[s == 0 for s in sizes]] == 0).all()


# ---- the node gives the bytes of the single ops ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_node_gives_the_bytes_of_the_chain(recipe, dtype, device):
    sizes = [37, 0, 64, 1]
    w13, w2, b13, b2 = parameters(device, dtype)
    x, dy = (torch.randn(sum(sizes) + 3, DIM, device=device).to(dtype) for _ in range(2))
    offs = sizes_to_offs(sizes, device)
    for activation in ACTIVATIONS:
        leaves = leaves_of(x, w13, w2, b13, b2)
        h = moxie.grouped_mm(leaves[0], leaves[1], offs, recipe=recipe, bias=leaves[3])
        a = moxie.swiglu(h, activation=activation)
        expected = gradients(moxie.grouped_mm(a, leaves[2], offs, recipe=recipe, bias=leaves[4]), dy, *leaves)
        leaves = leaves_of(x, w13, w2, b13, b2)
        options = {"b13": leaves[3], "b2": leaves[4], "recipe": recipe, "activation": activation}
        actual = gradients(moxie.expert_mlp(*leaves[:3], offs, **options), dy, *leaves)
        for name, a, e in zip(NAMES, actual, expected):
            assert_same_bytes(a, e, f"{activation} {name}")


@pytest.mark.parametrize("cached", (False, True), ids=("", "cached"))
@pytest.mark.parametrize("recipe", RECIPES)
def test_other_layouts_give_the_same_bytes(recipe, cached, device):
    if cached and recipe == "bf16":
        pytest.skip("there is nothing to cache")
    (x, weights, dy), (offs, slot_of, row_of) = routed(device)
    w13, w2, b13, b2 = parameters(device)
    expected = by_node(x, w13, w2, b13, b2, weights, dy, offs, slot_of, row_of, recipe=recipe)
    for layout, transposed in itertools.product(("concatenated", "interleaved"), (False, True)):
        stored = [interleave(t) if layout == "interleaved" else t for t in (w13, b13)]
        own13, own2 = ((t.mT.contiguous() if transposed else t) for t in (stored[0], w2))
        leaves = leaves_of(x, own13, own2, stored[1], b2, weights)
        options = {"recipe": recipe, "w13_layout": layout, "b13": leaves[3], "b2": leaves[4], "weights": leaves[5]}
        if cached:
            options["quantized_w13"] = moxie.WeightCache(leaves[1], recipe=recipe, w13_layout=layout, transposed=transposed)
            options["quantized_w2"] = moxie.WeightCache(leaves[2], recipe=recipe, transposed=transposed)
        views = [leaf.mT if transposed else leaf for leaf in leaves[1:3]]
        y = moxie.expert_mlp(leaves[0], *views, offs, slot_of=slot_of, row_of=row_of, top_k=TOP_K, **options)
        actual = dict(zip(NAMES, gradients(y, dy, *leaves)))
        assert actual["dw13"].is_contiguous() and actual["dw13"].shape == own13.shape
        if transposed:
            actual["dw13"], actual["dw2"] = actual["dw13"].mT, actual["dw2"].mT
        for name in NAMES:
            e = expected[name]
            e = interleave(e) if layout == "interleaved" and name in ("dw13", "db13") else e
            assert_same_bytes(actual[name].contiguous(), e, f"{layout} {transposed} {name}")


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "bf16"])
def test_weights_that_are_stored_transposed_are_quantized_without_a_copy(recipe, device):
    stored = torch.randn(3, 160, 224, device=device).bfloat16()
    expected = moxie.quantize_weights(stored.mT.contiguous(), recipe=recipe)
    with torch.autograd.profiler.profile() as profile:
        actual = moxie.quantize_weights(stored.mT, recipe=recipe)
    assert not any(event.name in ("aten::copy_", "aten::clone") for event in profile.function_events)
    for name, a, e in zip(("qdata", "scale", "qdata_t", "scale_t"), actual, expected):
        assert_same_bytes(a, e, name)


@pytest.mark.parametrize(
    "rowwise, colwise, layout",
    (
        ("1x32", "32x1", "plain"),
        ("1x32", "32x1", "swizzled"),
        ("32x32", "32x32", "swizzled"),
        ("1x128", "128x1", "quads"),
        ("128x128", "128x128", "quads"),
        ("128x128", "128x1", "plain"),
        ("128x32", "32x1", "plain"),
    ),
)
def test_a_transposed_stack_gives_the_same_bytes_in_every_layout(rowwise, colwise, layout, device):
    blocks = {"rowwise_block": rowwise, "colwise_block": colwise, "scale_layout": layout}
    for dtype, shape in itertools.product((torch.bfloat16, torch.float32), ((2, 130, 200), (3, 256, 128), (1, 1, 33))):
        stored = torch.randn(shape, device=device).to(dtype)
        expected = moxie.quantize_both(stored.mT.contiguous(), **blocks)
        for a, e in zip(moxie.quantize_both(stored.mT, **blocks), expected):
            assert_same_bytes(a, e, f"{dtype} {shape}")
        form = {"block": rowwise, "scale_layout": layout}
        assert_same_bytes(moxie.quantize_rowwise(stored.mT, **form)[0], expected[0], "one form")


def test_main_gradients_take_the_layout_of_their_weights(device):
    (x, weights, dy), (offs, slot_of, row_of) = routed(device, torch.float32)
    w13, w2, b13, b2 = parameters(device, torch.float32)
    own13, own2 = interleave(w13).mT.contiguous(), w2.mT.contiguous()
    route = {"slot_of": slot_of, "row_of": row_of, "top_k": TOP_K, "weights": weights}

    def run(**main_grads):
        leaves = leaves_of(own13, own2)
        y = moxie.expert_mlp(x, leaves[0].mT, leaves[1].mT, offs, b13=b13, b2=b2, **route, **GPT_OSS, **main_grads)
        y.backward(dy)
        return [leaf.grad for leaf in leaves]

    expected = run()
    sums = [torch.full_like(own13, 2.0), torch.full_like(own2, 3.0)]
    assert run(main_grad13=sums[0].mT, main_grad2=sums[1].mT) == [None, None]
    assert_same_bytes(sums[0], expected[0] + 2)
    assert_same_bytes(sums[1], expected[1] + 3)


# ---- torch.compile, extreme values and errors --------------------------------------------------------------------------------


def test_nan_stays_with_its_token_and_its_experts(device):
    (x, weights, dy), route = routed(device)
    tensors = parameters(device)
    x[7, 3] = float("nan")
    results = by_node(x, *tensors, weights, dy, *route, **GPT_OSS)
    assert results["y"][7].isnan().all() and results["dx"][7].isnan().all()
    others = torch.arange(TOKENS, device=device) != 7
    assert results["y"][others].isfinite().all() and results["dx"][others].isfinite().all()
    assert results["dweights"][others].isfinite().all() and results["db2"].isfinite().all()
    expert = torch.searchsorted(route[0], route[2], right=True).view(TOKENS, TOP_K)
    untouched = [e for e in range(EXPERTS) if e not in expert[7].tolist()]
    assert results["db13"][untouched].isfinite().all() and results["dw13"][untouched].isfinite().all()


@pytest.mark.parametrize("value", (float("inf"), -float("inf"), 1e30))
def test_the_clamp_makes_large_values_finite(value, device):
    h = torch.full((4, 8), value, device=device)
    h[:, :4] = 1e30 if value < 0 else value  # where `value` is -inf the gates are 1e30, because silu(-inf) is NaN
    a = moxie.swiglu(h, activation="clamped_swiglu")
    expected = 7 * torch.tensor(1.702 * 7).sigmoid() * (8 if value > 0 else -6)
    torch.testing.assert_close(a.cpu(), expected.expand(4, 4).float())
    assert (moxie.swiglu_backward(torch.ones_like(a), h, activation="clamped_swiglu") == 0).all()


def test_compiled_the_bytes_are_those_of_eager(device):
    (x, weights, dy), route = routed(device)
    tensors = parameters(device)
    expected = by_node(x, *tensors, weights, dy, *route, **GPT_OSS)
    torch._dynamo.reset()
    mlp = torch.compile(moxie.expert_mlp, fullgraph=True)
    leaves = leaves_of(x, *tensors, weights)
    x, w13, w2, b13, b2, weights = leaves
    options = {"slot_of": route[1], "row_of": route[2], "top_k": TOP_K, "weights": weights}
    y = mlp(x, w13, w2, route[0], b13=b13, b2=b2, **options, **GPT_OSS)
    for name, actual in zip(NAMES, gradients(y, dy, *leaves)):
        assert_same_bytes(actual, expected[name], name)


def test_under_autocast_rows_are_bf16_and_biases_keep_their_dtype(device):
    (x, weights, dy), route = routed(device, torch.float32)
    tensors = parameters(device, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        actual = by_node(x, *tensors, weights, dy, *route, **GPT_OSS)
    assert actual["y"].dtype == torch.bfloat16
    assert all(actual[name].dtype == torch.float32 for name in NAMES[1:])
    rounded = by_node(x.bfloat16(), *tensors, weights, dy, *route, **GPT_OSS)
    for name in ("y", "dw13", "dw2", "db13", "db2", "dweights"):
        assert_same_bytes(actual[name], rounded[name], name)


WRONG = {
    "activation": ({"activation": "relu"}, "expert_mlp: activation must be 'swiglu' or 'clamped_swiglu', got 'relu'"),
    "layout": ({"w13_layout": "rows"}, "expert_mlp: w13_layout must be 'concatenated' or 'interleaved', got 'rows'"),
    "b13": ({"b13": torch.zeros(EXPERTS, HIDDEN)}, r"expert_mlp: b13 must be \[4, 80\], got \[4, 40\]"),
    "b2": ({"b2": torch.zeros(DIM)}, r"expert_mlp: b2 must be \[4, 96\], got \[96\]"),
}


@pytest.mark.parametrize("options, message", WRONG.values(), ids=WRONG)
def test_wrong_options_are_refused(options, message):
    w13, w2, _, _ = parameters("cpu")
    x, offs = torch.zeros(9, DIM, dtype=torch.bfloat16), sizes_to_offs([3, 3, 3, 0])
    with pytest.raises(ValueError, match=message):
        moxie.expert_mlp(x, w13, w2, offs, **options)
    with pytest.raises(ValueError, match="swiglu: activation must be"):
        moxie.swiglu(torch.zeros(2, 4), activation="relu")
