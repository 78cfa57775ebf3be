"""grouped_mm under torch.compile, checkpointing and autocast, and the weight cache under each of them."""

import copy
import functools

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import moxie
from grouped_reference import gaussian, run
from support import as_bytes, assert_same_bytes, sizes_to_offs

RECIPES = moxie.recipe_names()
# Numbers of rows to compile for. At the second, torch.compile makes the rows dynamic; LATER_SIZES must not compile again.
SIZES, LATER_SIZES = (70, 100, 45, 2000), (333, 46, 1999, 64, 777)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def compiled(function, backend: str):
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True), counter


def problem_of(rows: int, device: str, **kwargs):
    return gaussian([5, 0, 33, rows - 40], 64, 96, tail=2, device=device, **kwargs)


def step(function, problem, **kwargs):
    """Runs forward and backward. Returns y and the gradients."""
    leaves = [t.detach().requires_grad_() for t in (problem.x, problem.w, problem.bias) if t is not None]
    y = function(*leaves[:2], problem.offs, *leaves[2:], **kwargs)
    y.backward(problem.dy.to(y.dtype))
    return y.detach(), *(leaf.grad for leaf in leaves)


# ---- torch.compile ---------------------------------------------------------------------------------------------------------


def between(x, w, offs, bias=None, *, recipe="mxfp8_rceil_128", **kwargs):
    """Calls the op between elementwise ops, so that inductor has something to fuse."""
    y = moxie.grouped_mm(torch.relu(x) - 1, w, offs, recipe=recipe, bias=bias, **kwargs)
    return y * 2


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
@pytest.mark.parametrize("recipe", RECIPES)
def test_forward_and_backward_compile_without_a_recompile_per_step(recipe, backend, device):
    if backend == "inductor" and recipe not in ("mxfp8_rceil_128", "mxfp8_rceil", "fp8_rowwise"):
        pytest.skip("inductor is slow: three recipes stand for all")
    eager = functools.partial(between, recipe=recipe)
    function, counter = compiled(eager, backend)
    counts = []
    for rows in SIZES + LATER_SIZES:
        problem = problem_of(rows, device, dtype=torch.float32)
        assert_same_bytes(step(function, problem), step(eager, problem), f"{rows} rows")
        counts.append(counter.frame_count)
    assert counts[-1] == counts[len(SIZES) - 1] <= 3, counts


@pytest.mark.parametrize("bias", ("n", "gn"))
def test_a_bias_compiles(bias, device):
    function, _ = compiled(between, "aot_eager")
    for rows in SIZES:
        problem = problem_of(rows, device, dtype=torch.float32, bias=bias)
        assert_same_bytes(step(function, problem), step(between, problem), f"{rows} rows")


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_a_compiled_step_adds_to_the_main_gradient(backend, device):
    problem = problem_of(100, device, dtype=torch.float32)
    expected = step(between, problem)[2]
    function, _ = compiled(between, backend)
    main_grad = torch.full_like(problem.w, 0.25)
    for count in (1, 2):
        assert step(function, problem, main_grad=main_grad)[2] is None
        torch.testing.assert_close(main_grad, 0.25 + count * expected, rtol=1e-5, atol=1e-4)


def test_only_the_gradient_of_x_compiles(device):
    function, _ = compiled(between, "aot_eager")
    problem = problem_of(100, device, dtype=torch.float32)
    grads = []
    for call in (between, function):
        x = problem.x.detach().requires_grad_()
        call(x, problem.w, problem.offs).backward(problem.dy)
        grads.append(x.grad)
    assert_same_bytes(grads[1], grads[0])


def test_inference_compiles(device):
    function, _ = compiled(between, "inductor")
    problem = problem_of(100, device, dtype=torch.float32)
    with torch.no_grad():
        assert_same_bytes(function(problem.x, problem.w, problem.offs), between(problem.x, problem.w, problem.offs))


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_the_number_of_rows_may_depend_on_data(device):
    def chosen(x, mask, w, offs):
        return moxie.grouped_mm(x[mask], w, offs)

    function, counter = compiled(chosen, "aot_eager")
    problem = problem_of(200, device, dtype=torch.float32)
    for seed in range(3):
        mask = (torch.rand(200, generator=torch.Generator().manual_seed(seed)) > 0.3).to(device)
        offs = sizes_to_offs([5, 0, int(mask.sum()) - 5, 0], device)
        with torch.no_grad():
            assert_same_bytes(function(problem.x, mask, problem.w, offs), chosen(problem.x, mask, problem.w, offs))
    assert counter.frame_count == 1


def test_a_bad_call_is_refused_while_tracing(device):
    function, _ = compiled(lambda x, w: moxie.grouped_mm(x, w, recipe="mxfp9"), "aot_eager")
    with pytest.raises(Exception, match="grouped_mm: there is no recipe 'mxfp9'"):
        function(torch.zeros(4, 32, device=device), torch.zeros(1, 8, 32, device=device))


# ---- checkpointing ---------------------------------------------------------------------------------------------------------


class Count(TorchDispatchMode):
    """Counts the forward products."""

    def __init__(self):
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.products += func is torch.ops.moxie.grouped_mm.quantized
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("recipe", RECIPES)
def test_activation_checkpointing_gives_the_same_bytes(recipe, reentrant, device):
    problem = problem_of(100, device, bias="n")
    eager = functools.partial(between, recipe=recipe)
    recomputed = lambda *args: checkpoint(eager, *args, use_reentrant=reentrant)
    with Count() as count:
        results = step(recomputed, problem)
    assert count.products == 2
    assert_same_bytes(results, step(eager, problem))


def test_selective_checkpointing_keeps_the_product(device):
    problem = problem_of(100, device, bias="n")
    context = functools.partial(create_selective_checkpoint_contexts, [torch.ops.moxie.grouped_mm.quantized])
    selective = lambda *args: checkpoint(between, *args, use_reentrant=False, context_fn=context)
    with Count() as count:
        results = step(selective, problem)
    assert count.products == 1, "the result was kept, not computed again"
    assert_same_bytes(results, step(between, problem))


@pytest.mark.parametrize("kept", ([], [torch.ops.moxie.grouped_mm.quantized]), ids=("all", "selective"))
def test_checkpointing_compiles(kept, device):
    context = functools.partial(create_selective_checkpoint_contexts, kept)
    eager = lambda *args: checkpoint(between, *args, use_reentrant=False, context_fn=context)
    function, _ = compiled(eager, "aot_eager")
    for rows in SIZES:
        problem = problem_of(rows, device, dtype=torch.float32)
        assert_same_bytes(step(function, problem), step(between, problem), f"{rows} rows")


def test_checkpointing_adds_to_the_main_gradient_once(device):
    problem = problem_of(100, device, dtype=torch.float32)
    main_grad = torch.zeros_like(problem.w)
    step(lambda *args: checkpoint(between, *args, use_reentrant=False, main_grad=main_grad), problem)
    torch.testing.assert_close(main_grad, step(between, problem)[2], rtol=1e-5, atol=1e-4)


# ---- autocast --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_under_autocast_activations_take_its_dtype_and_weights_keep_theirs(recipe, device):
    problem = problem_of(100, device, dtype=torch.float32, bias="gn")
    with torch.autocast(device, dtype=torch.bfloat16):
        y, dx, dw, dbias = step(functools.partial(moxie_call, recipe=recipe), problem)
    assert [t.dtype for t in (y, dx, dw, dbias)] == [torch.bfloat16] + [torch.float32] * 3
    problem.x = problem.x.bfloat16()
    expected = run(problem, recipe)  # f32 weights are quantized from f32, not from a bf16 copy
    assert_same_bytes((y, dx, dw, dbias), (expected.y, expected.dx.float(), expected.dw, expected.dbias))


def moxie_call(x, w, offs, bias=None, recipe="mxfp8_rceil_128"):
    return moxie.grouped_mm(x, w, offs, recipe=recipe, bias=bias)


def test_autocast_compiles(device):
    def call(x, w, offs):
        with torch.autocast(device, dtype=torch.bfloat16):
            return moxie.grouped_mm(x, w, offs)

    function, _ = compiled(call, "aot_eager")
    problem = problem_of(100, device, dtype=torch.float32)
    assert_same_bytes(step(function, problem), step(call, problem))


def test_autocast_that_is_off_changes_nothing(device):
    problem = problem_of(100, device, dtype=torch.float32)
    with torch.autocast(device, enabled=False):
        assert_same_bytes(step(moxie_call, problem), step(moxie_call, problem))


# ---- the weight cache ------------------------------------------------------------------------------------------------------


class Experts(torch.nn.Module):
    def __init__(self, device: str, recipe: str = "mxfp8_rceil_128", cached: bool = True):
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.w = torch.nn.Parameter(torch.randn(4, 64, 96, generator=generator).to(device))
        self.recipe = recipe
        self.cache = moxie.WeightCache(self.w, recipe=recipe) if cached else None

    def forward(self, x, offs):
        return moxie.grouped_mm(x, self.w, offs, recipe=self.recipe, quantized_w=self.cache)


def train(model, device, call=None, steps: int = 4, micro_batches: int = 1, fused: bool = False, refresh=None):
    """Trains a few steps with AdamW; returns the outputs of all forwards."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    if refresh:
        refresh(optimizer)
    outputs = []
    for i in range(steps * micro_batches):
        problem = problem_of(100 + 10 * i, device, dtype=torch.float32, seed=i)
        y = (model if call is None else call)(problem.x, problem.offs)
        y.backward(problem.dy)
        outputs.append(y.detach())
        if (i + 1) % micro_batches == 0:
            optimizer.step()
            optimizer.zero_grad()
    return outputs


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "bf16"])
def test_a_cache_gives_the_bytes_of_quantizing_anew(recipe, device):
    problem = problem_of(100, device)
    cache = moxie.WeightCache(problem.w, recipe=recipe)
    assert_same_bytes(tuple(run(problem, recipe, quantized_w=cache)), tuple(run(problem, recipe)))
    assert_same_bytes(tuple(run(problem, recipe, quantized_w=cache.tensors)), tuple(run(problem, recipe)))


@pytest.mark.parametrize("fused", (False, True))
@pytest.mark.parametrize("micro_batches", (1, 3))
def test_training_with_a_cache_refreshed_after_the_optimizer_is_training_without(micro_batches, fused, device):
    plain, cached = Experts(device, cached=False), Experts(device)
    expected = train(plain, device, micro_batches=micro_batches, fused=fused)
    actual = train(cached, device, micro_batches=micro_batches, fused=fused, refresh=cached.cache.refresh_after)
    assert_same_bytes(actual, expected)
    assert_same_bytes(cached.w, plain.w)


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_a_cache_may_be_refreshed_inside_a_compiled_step(backend, device):
    plain, cached = Experts(device, cached=False), Experts(device)
    expected = train(plain, device)

    def refreshed(x, offs):
        cached.cache.refresh_()
        return cached(x, offs)

    function, counter = compiled(refreshed, backend)
    assert_same_bytes(train(cached, device, call=function), expected)
    assert counter.frame_count <= 2


def test_a_cache_works_in_a_compiled_model_with_the_hook_outside(device):
    plain, cached = Experts(device, cached=False), Experts(device)
    expected = train(plain, device)
    function, _ = compiled(cached, "inductor")
    assert_same_bytes(train(cached, device, call=function, refresh=cached.cache.refresh_after), expected)


def test_a_cache_works_under_checkpointing(device):
    plain, cached = Experts(device, cached=False), Experts(device)
    expected = train(plain, device)
    call = lambda x, offs: checkpoint(cached, x, offs, use_reentrant=False)
    assert_same_bytes(train(cached, device, call=call, refresh=cached.cache.refresh_after), expected)


def test_a_write_through_data_is_seen_after_refresh_and_not_before(device):
    problem, model = problem_of(100, device, dtype=torch.float32), Experts(device)
    before = model(problem.x, problem.offs)
    model.w.data.mul_(-3)
    assert_same_bytes(model(problem.x, problem.offs), before)
    model.cache.refresh_()
    assert_same_bytes(model(problem.x, problem.offs), moxie.grouped_mm(problem.x, model.w, problem.offs))


def test_refresh_takes_a_parameter_that_replaced_the_old_one(device):
    model = Experts(device)
    new = torch.nn.Parameter(torch.randn_like(model.w))
    assert model.cache.refresh_(new) is model.cache
    assert_same_bytes([as_bytes(t) for t in model.cache.tensors], [as_bytes(t) for t in moxie.quantize_weights(new)])
    with torch.no_grad():
        new.mul_(2)
    model.cache.refresh_()
    assert_same_bytes([as_bytes(t) for t in model.cache.tensors], [as_bytes(t) for t in moxie.quantize_weights(new)])


def test_refreshing_between_forward_and_backward_is_noticed(device):
    problem, model = problem_of(100, device, dtype=torch.float32), Experts(device)
    y = model(problem.x.requires_grad_(), problem.offs)
    model.cache.refresh_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(problem.dy)


def test_a_cache_is_no_part_of_a_state_dict_and_owns_no_parameter(device):
    model = Experts(device)
    assert list(model.state_dict()) == ["w"] and [name for name, _ in model.named_parameters()] == ["w"]
    assert list(dict(model.cache.named_parameters())) == []
    model.load_state_dict({"w": torch.randn(4, 64, 96)})


def test_a_copy_of_a_model_caches_its_own_weights(device):
    model = Experts(device)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.w.mul_(-2)
    other.cache.refresh_()
    model.cache.refresh_()
    assert_same_bytes([as_bytes(t) for t in other.cache.tensors], [as_bytes(t) for t in moxie.quantize_weights(other.w)])
    assert_same_bytes([as_bytes(t) for t in model.cache.tensors], [as_bytes(t) for t in moxie.quantize_weights(model.w)])


def test_a_cache_says_how_many_bytes_it_takes(device):
    w = torch.randn(4, 256, 384, device=device)
    for recipe, scales in (
        ("mxfp8_rceil_128", 2 * 4 * 2 * 3),
        ("mxfp8_rceil", 2 * w.numel() // 32),
        ("fp8_rowwise", 4 * 4 * (256 + 384)),
    ):
        cache = moxie.WeightCache(w, recipe=recipe)
        assert cache.nbytes >= 2 * w.numel() + scales
        path = moxie.explain(recipe, 256, 384, device=w.device).forward.kernel
        if path == "sm90":  # its scales are in fours along k, so 3 and 2 are padded to 4
            scales = 4 * (2 * 4 + 3 * 4)
        if path != "sm100":  # sm100 stores a scale per 1x32 block, however large the recipe's blocks are
            assert cache.nbytes == 2 * w.numel() + scales
    with pytest.raises(ValueError, match="quantize_weights: the recipe bf16 quantizes nothing"):
        moxie.WeightCache(w, recipe="bf16")
