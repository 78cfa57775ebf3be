"""The MoE layer quantizes rows while it permutes tokens. Its results have the bytes of permute followed by expert_mlp, but the
permuted rows are never in memory."""

import functools

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import moxie
import moxie.nn
from support import assert_same_bytes

RECIPES = moxie.recipe_names()
KEEP_ROWS = ("bf16", "fp8_rowwise", "mxfp8_rceil_wgrad_with_hp")  # recipes that cannot fuse permute with quantization
BLOCKS = [name for name in RECIPES if name not in KEEP_ROWS]
EXPERTS, DIM, HIDDEN = 4, 96, 40
FP8 = (torch.float8_e4m3fn, torch.float8_e8m0fnu)


def make(device: str, dtype=torch.bfloat16, tokens: int = 50, top_k: int = 2):
    """Makes a problem: (x, w13, w2), dy, and the routing (offs, slot_of, row_of, top_k)."""
    normal = lambda *shape: torch.randn(shape).to(dtype).to(device)
    ids = moxie.top_k(torch.randn(tokens, EXPERTS), top_k)
    routing = tuple(t.to(device) for t in moxie.route(ids, EXPERTS))
    return (
        (normal(tokens, DIM), normal(EXPERTS, 2 * HIDDEN, DIM) * DIM**-0.5, normal(EXPERTS, DIM, HIDDEN) * HIDDEN**-0.5),
        normal(tokens * top_k, DIM),
        (*routing, top_k),
    )


def fused(x, w13, w2, offs, slot_of, row_of, top_k, **kwargs):
    return moxie.expert_mlp(x, w13, w2, offs, slot_of=slot_of, row_of=row_of, top_k=top_k, **kwargs)


def unfused(x, w13, w2, offs, slot_of, row_of, top_k, **kwargs):
    return moxie.expert_mlp(moxie.permute(x, slot_of, row_of, top_k), w13, w2, offs, **kwargs)


def step(function, problem, needs=(True, True, True), **kwargs):
    tensors, dy, routing = problem
    leaves = [leaf.detach().requires_grad_(need) for leaf, need in zip(tensors, needs)]
    y = function(*leaves, *routing, **kwargs)
    y.backward(dy.to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def assert_same(actual, expected, what="") -> None:
    for name, a, b in zip(("y", "dx", "dw13", "dw2"), actual, expected, strict=True):
        assert (a is None) == (b is None), f"{what} {name}"
        if a is not None:
            assert_same_bytes(a, b, f"{what} {name}")


class Spy(TorchDispatchMode):
    """Records the names of the Moxie ops that run, and every tensor that any op makes."""

    def __init__(self):
        super().__init__()
        self.names, self.made = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "moxie":
            forms = {2: " one form", 4: " both forms"}[len(out)] if isinstance(out, list) else ""
            self.names.append(func._schema.name.split("::")[1] + forms)
        self.made += [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        return out


def storages(tensors) -> dict[int, int]:
    """Returns the size of each storage that the tensors use, by its address."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


class ByStep(torch.autograd.Function):
    """The MoE layer after its router, computed by single ops in the order of docs/MOE.md. The routing weights are applied in
    SwiGLU's backward, so dy is quantized without them, and wgrad of w2 contracts dy with weight * a."""

    @staticmethod
    def forward(ctx, x, w13, w2, weights, route, recipe):
        offs, slot_of, row_of, top_k = route
        rows = moxie.permute(x, slot_of, row_of, top_k)
        h = moxie.grouped_mm(rows, w13, offs, recipe=recipe)
        y = moxie.grouped_mm(moxie.swiglu(h), w2, offs, recipe=recipe)
        ctx.save_for_backward(x, w13, w2, weights, h)
        ctx.route, ctx.recipe = route, recipe
        return moxie.unpermute(y, slot_of, row_of, x.shape[0], weights=weights)

    @staticmethod
    def backward(ctx, dy):
        x, w13, w2, weights, h = ctx.saved_tensors
        offs, slot_of, row_of, top_k = ctx.route

        def linear(x, w, dy):
            leaves = [t.detach().requires_grad_() for t in (x, w)]
            with torch.enable_grad():
                return torch.autograd.grad(moxie.grouped_mm(*leaves, offs, recipe=ctx.recipe), leaves, dy)

        dy = moxie.permute(dy, slot_of, row_of, top_k)
        da, _ = linear(moxie.swiglu(h), w2, dy)
        _, dw2 = linear(torch.ops.moxie._weighted_swiglu(h, weights, slot_of), w2, dy)
        dh, dweights = torch.ops.moxie._weighted_swiglu_backward(da, h, weights, slot_of)
        dx, dw13 = linear(moxie.permute(x, slot_of, row_of, top_k), w13, dh)
        return moxie.unpermute(dx, slot_of, row_of, x.shape[0]), dw13, dw2, dweights, None, None


# ---- the same bytes --------------------------------------------------------------------------------------------------------


# (tokens, experts, top_k), among them no token, one token, every top_k from 1 to 8, and few as well as many rows per expert
SHAPES = [
    (0, 4, 2),
    (1, 1, 1),
    (37, 5, 1),
    (64, 8, 2),
    (50, 3, 3),
    (129, 33, 4),
    (40, 6, 5),
    (33, 6, 6),
    (31, 7, 7),
    (80, 64, 8),
    (2000, 2, 2),
]


def unfused_layer(layer: moxie.nn.MoE, x: torch.Tensor) -> torch.Tensor:
    experts, router = layer.experts, layer.router
    routing = router(x)
    offs, slot_of, row_of = moxie.route(routing.ids, router.num_experts)
    route = (offs, slot_of, row_of, router.top_k)
    return ByStep.apply(x, experts.w13, experts.w2, routing.weights, route, experts.recipe) + layer.shared(x)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_layer_gives_the_bytes_of_its_unfused_steps(recipe, device):
    for tokens, experts, top_k in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            layer = moxie.nn.MoE(DIM, HIDDEN, experts, top_k, recipe=recipe, device=device, dtype=dtype, shared_hidden_dim=32)
            x = torch.randn(tokens, DIM, device=device, dtype=dtype, requires_grad=True)

            names = ["x", *(name for name, _ in layer.named_parameters())]
            actual, expected = layer(x), unfused_layer(layer, x)
            assert_same_bytes(actual, expected, "y")
            dy, leaves = torch.randn_like(actual), [x, *layer.parameters()]
            grads = zip(names, torch.autograd.grad(actual, leaves, dy), torch.autograd.grad(expected, leaves, dy))
            for name, a, e in grads:
                assert_same_bytes(a, e, f"{tokens} tokens, {experts} experts, top_k {top_k}, {dtype}: d{name}")


@pytest.mark.parametrize("tokens", (50, 3000))
@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_are_quantized_by_the_op_that_takes_them_in_the_forms_that_are_needed(recipe, tokens, device):
    for needs in ((True, True, True), (True, False, True), (False, True, False), (False, False, False)):
        problem = make(device, tokens=tokens)
        tensors, _, routing = problem
        leaves = [leaf.requires_grad_(need) for leaf, need in zip(tensors, needs)]
        with Spy() as spy:
            fused(*leaves, *routing, recipe=recipe)
        # Forward makes the rowwise form of the permuted rows only; backward permutes x again to make the colwise form.
        taken_by = "permute" if recipe in ("bf16", "fp8_rowwise") else "_permute_quantize one form"
        assert [name for name in spy.names if "permute" in name] == [taken_by], needs
        if any(needs):
            assert_same(step(fused, problem, needs, recipe=recipe), step(unfused, problem, needs, recipe=recipe), needs)


@pytest.mark.parametrize("recipe", BLOCKS)
def test_rows_of_tokens_are_neither_made_nor_kept(recipe, device):
    tensors, _, routing = make(device, tokens=3000)
    leaves = [leaf.requires_grad_() for leaf in tensors]

    def made_and_kept(function):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t), Spy() as spy:
            y = function(*leaves, *routing, recipe=recipe)
        made, kept = storages(spy.made), storages(saved)
        for leaf in leaves:  # an op may return a view of a leaf, which is no new memory
            made.pop(leaf.untyped_storage().data_ptr(), None)
        return sum(made.values()), sum(kept.values()), len([t for t in spy.made if t.shape == y.shape and t.dtype not in FP8])

    made, kept, num_wide = made_and_kept(fused)
    assert num_wide == 1, "y alone"
    made_by_steps, kept_by_steps, _ = made_and_kept(unfused)
    rows, tokens, indices = 6000 * DIM * 2, 3000 * DIM * 2, 2 * 6000 * 4  # bf16 and int32
    assert made == made_by_steps - rows
    # Either way slot_of and row_of are kept. Beyond these, `unfused` keeps the permuted rows and `fused` keeps x.
    assert kept == kept_by_steps - rows + tokens and indices > 0


@pytest.mark.parametrize("recipe", ("mxfp8_rceil_128", "mxfp8_rceil", "bf16"))
def test_caches_and_main_gradients_give_the_same_bytes(recipe, device):
    problem = make(device, torch.float32)
    _, w13, w2 = problem[0]
    options = lambda: {"recipe": recipe, "main_grad13": torch.zeros_like(w13), "main_grad2": torch.zeros_like(w2)}
    of_node, of_steps = options(), options()
    caches = (
        {}
        if recipe == "bf16"
        else {"quantized_w13": moxie.WeightCache(w13, recipe=recipe), "quantized_w2": moxie.WeightCache(w2, recipe=recipe)}
    )
    for _ in range(2):
        actual = step(fused, problem, **of_node, **caches)
        assert_same(actual, step(unfused, problem, **of_steps, **caches))
        assert actual[2] is None and actual[3] is None
    for name in ("main_grad13", "main_grad2"):
        assert_same_bytes(of_node[name], of_steps[name], name)
        assert of_node[name].any()


# ---- with torch.compile, checkpointing and autocast ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("recipe", ("mxfp8_rceil_128", "fp8_rowwise", "bf16", "identity"))
def test_under_autocast_the_rows_of_a_token_are_added_up_in_the_dtype_of_x(recipe, dtype, device):
    if (dtype == torch.float64) != (recipe == "identity"):
        pytest.skip("f64 is for the recipe that keeps the dtype")
    problem = make(device, dtype, top_k=3)
    with torch.autocast(device, dtype=torch.bfloat16):
        actual, expected = step(fused, problem, recipe=recipe), step(unfused, problem, recipe=recipe)
    assert actual[1].dtype == dtype
    assert_same(actual, expected)


@pytest.mark.parametrize("selective", (False, True))
def test_checkpointing_gives_the_same_bytes(selective, device):
    problem, kwargs = make(device), {}
    if selective:
        kept = [torch.ops.moxie.grouped_mm.quantized]
        kwargs["context_fn"] = functools.partial(create_selective_checkpoint_contexts, kept)
    function = lambda *args: checkpoint(fused, *args, use_reentrant=False, **kwargs)
    assert_same(step(function, problem), step(unfused, problem))


@pytest.mark.parametrize("backend, autocast", (("aot_eager", False), ("aot_eager", True), ("inductor", False)))
def test_the_node_compiles_without_a_recompile_per_step(backend, autocast, device):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    function = torch.compile(lambda *args: fused(*args), backend=counter, fullgraph=True)
    for tokens in (50, 77, 300, 41):
        problem = make(device, torch.float32, tokens)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            assert_same(step(function, problem), step(unfused, problem), f"{tokens} tokens")
    assert counter.frame_count <= 2


def test_inference_mode_gives_the_same_bytes(device):
    tensors, _, routing = make(device)
    with torch.inference_mode():
        assert_same_bytes(fused(*tensors, *routing), unfused(*tensors, *routing))


def test_statistics_are_those_of_the_rows(device):
    layer = moxie.nn.GroupedExperts(DIM, HIDDEN, EXPERTS, device=device, dtype=torch.bfloat16)
    (x, *_), _, (offs, slot_of, row_of, top_k) = make(device)
    expected = layer(x, offs, slot_of=slot_of, row_of=row_of, top_k=top_k)
    layer.collect_stats = True
    assert_same_bytes(layer(x, offs, slot_of=slot_of, row_of=row_of, top_k=top_k), expected)
    once = layer.stats.clone()
    assert once[0, 0, -1] == 100 * DIM
    layer.reset_stats_()
    layer(moxie.permute(x, slot_of, row_of, top_k), offs)
    assert torch.equal(layer.stats, once)


# ---- errors ----------------------------------------------------------------------------------------------------------------


(X, W13, W2), _, (OFFS, SLOT_OF, ROW_OF, _) = make("cpu")
BAD_CALLS = [
    ({"slot_of": SLOT_OF, "top_k": 2}, ValueError, "give slot_of and row_of together, or neither"),
    ({"row_of": ROW_OF}, ValueError, "give slot_of and row_of together, or neither"),
    ({"top_k": 2}, ValueError, "top_k must be 1 or more, and 1 without slot_of, got 2"),
    ({"slot_of": SLOT_OF, "row_of": ROW_OF, "top_k": 0}, ValueError, "top_k must be 1 or more", "got 0"),
    ({"slot_of": SLOT_OF, "row_of": ROW_OF, "top_k": 3}, ValueError, "slot_of must be [150], got [100]"),
    ({"slot_of": SLOT_OF, "row_of": ROW_OF[1:], "top_k": 2}, ValueError, "row_of must be [100], got [99]"),
    ({"slot_of": SLOT_OF.long(), "row_of": ROW_OF, "top_k": 2}, TypeError, "slot_of must be torch.int32, got torch.int64"),
    ({"slot_of": SLOT_OF, "row_of": ROW_OF.to("meta"), "top_k": 2}, ValueError, "got row_of on meta beside cpu"),
    ({"x_dtype": torch.float16}, TypeError, "x_dtype must be torch.bfloat16 or torch.float32, got torch.float16"),
    ({"slot_of": SLOT_OF + 1, "row_of": ROW_OF, "top_k": 2}, ValueError, "slot_of must be 0 to 99, got 100"),
]


def test_experts_that_collect_stats_take_slot_of_and_row_of_together_too():
    experts = moxie.nn.GroupedExperts(DIM, HIDDEN, 2, collect_stats=True)
    with pytest.raises(ValueError, match="give slot_of and row_of together, or neither"):
        experts(X, OFFS, slot_of=SLOT_OF)


@pytest.mark.parametrize(
    "kwargs, exception, parts", [pytest.param(*case[:2], case[2:], id=str(i)) for i, case in enumerate(BAD_CALLS)]
)
def test_a_bad_call_says_the_op_the_rule_and_the_value(kwargs, exception, parts):
    for recipe in ("mxfp8_rceil_128", "bf16"):
        with pytest.raises(exception) as caught:
            moxie.expert_mlp(X, W13, W2, OFFS, recipe=recipe, **kwargs)
        message = str(caught.value)
        assert message.startswith("expert_mlp: ") or "got 100" in message, message
        for part in parts:
            assert part in message, message
