"""A call is planned once, at its entry: explain() tells what runs, and below the entry no text is passed on."""

import os
import pathlib
import random
import subprocess
import sys

import pytest
import torch
from torch.library import opcheck
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import moxie
import moxie.nn
from grouped_reference import gaussian
from support import assert_same_bytes
from test_opcheck import FP8, tensors_in

RECIPES = moxie.recipe_names()
# The environment of the Python processes that these tests start.
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


class Calls(TorchDispatchMode):
    """Records every Moxie op that is called below autograd, with its arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "moxie":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def counts() -> dict[str, int]:
    parsed, planned = torch.ops.moxie._counts()
    return {"parsed": parsed, "planned": planned}


def layer_and_input(recipe: str, device: str, **kwargs):
    torch.manual_seed(1)
    layer = moxie.nn.MoE(64, 96, 4, 2, recipe=recipe, device=device, dtype=torch.bfloat16, **kwargs)
    return layer, torch.randn(50, 64, device=device, dtype=torch.bfloat16, requires_grad=True)


# ---- one plan, one text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", (False, True), ids=("quantized each time", "cached"))
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_parses_one_text_makes_one_plan_and_passes_no_text_on(recipe, cache, device):
    layer, x = layer_and_input(recipe, device, weight_cache=cache)
    before = counts()
    with Calls() as seen:
        y = layer(x)
    forward = counts()
    assert forward["parsed"] - before["parsed"] == 1, "expert_mlp is the one public call with a recipe"
    assert forward["planned"] - before["planned"] == 1
    with Calls() as seen_backward:
        y.backward(torch.ones_like(y))
    assert counts() == forward, "backward reads the plan that forward made"
    calls = seen.calls + seen_backward.calls
    assert any(func is torch.ops.moxie.grouped_mm.quantized for func, _, _ in calls)
    for func, args, kwargs in calls:
        assert not [value for value in (*args, *kwargs.values()) if isinstance(value, str)], func


def test_a_product_of_a_quantized_x_passes_no_text_on(device):
    from moxie.mx_tensor import MXTensor

    problem = gaussian([40, 0, 33], 64, 96, device=device)
    for recipe, block in (("mxfp8_rceil", "1x32"), ("mxfp8_rceil", "1x128"), ("mxfp8_rceil_wgrad_with_hp", "1x32")):
        x, w = MXTensor.to_mx(problem.x.requires_grad_(), block=block), problem.w.detach().requires_grad_()
        before = counts()
        with Calls() as seen:
            moxie.grouped_mm(x, w, problem.offs, recipe=recipe).backward(problem.dy)
        assert counts() == {name: count + 1 for name, count in before.items()}
        inside = [call for call in seen.calls if call[0] is not torch.ops.moxie.grouped_mm.mx]
        for func, args, kwargs in inside:
            assert not [value for value in (*args, *kwargs.values()) if isinstance(value, str)], func


@pytest.mark.parametrize("recipe", ("mxfp8_rceil_128", "mxfp8_rceil", "fp8_rowwise", "bf16"))
def test_the_ops_that_a_layer_calls_obey_torch(recipe, device):
    layer, x = layer_and_input(recipe, device)
    with Calls() as seen:
        layer(x).sum().backward()
    checked = set()
    for func, args, kwargs in seen.calls:
        if func in checked or not (func._overloadname == "quantized" or func._schema.name.startswith("moxie::_")):
            continue
        checked.add(func)
        fp8 = any(t.dtype in FP8 for t in tensors_in(args, kwargs).values())
        checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
        opcheck(func, args, kwargs, test_utils=checks if fp8 else ["test_schema", *checks])
    assert torch.ops.moxie.grouped_mm.quantized in checked


# ---- explain tells what runs ---------------------------------------------------------------------------------------------------


def products_of(call, device: str) -> set[str]:
    """Runs the call under torch's profiler. Returns the kinds of products that ran: torch's ops and, on a GPU, Moxie's
    kernels."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities) as seen:
        call()
        if device == "cuda":
            torch.cuda.synchronize()
    names = {event.key for event in seen.key_averages()}
    found = {
        short
        for short, ops in (
            ("mm", ("aten::mm", "aten::addmm")),
            ("torch._grouped_mm", ("aten::_grouped_mm",)),
            ("scaled", ("aten::_scaled_grouped_mm",)),
        )
        if names & set(ops)
    }
    found |= {"sm90" for name in names if "sm90::gemm_kernel" in name}
    return found | {"product" for name in names if "product_kernel" in name}


def said(told, device: str) -> set[str]:
    """Translates the kernels that explain() gives for some passes into the names that products_of returns."""
    kernels = {one.kernel.removeprefix("decode, ") for one in told}
    if device == "cpu":
        kernels -= {"sm90"}  # on a CPU the reference of this kernel runs, which is no op of torch
    return {"scaled" if kernel in ("sm90_rows", "sm100") else kernel for kernel in kernels}


def products_of_both(problem, recipe: str, device: str) -> tuple[set[str], set[str]]:
    """Of forward and of backward."""
    results = []
    x, w = problem.x.requires_grad_(), problem.w.requires_grad_()
    forward = products_of(lambda: results.append(moxie.grouped_mm(x, w, problem.offs, recipe=recipe)), device)
    return forward, products_of(lambda: results[0].backward(problem.dy), device)


@pytest.mark.parametrize("n, k", ((64, 96), (48, 80), (40, 72), (33, 50)))
@pytest.mark.parametrize("recipe", RECIPES)
def test_explain_names_the_products_that_run(recipe, n, k, device):
    """explain() names the products that run. On a CPU this must hold also if calls are planned as for a GPU."""
    for gpu in ("", "sm90", "other") if device == "cpu" else ("",):
        for dtype in (torch.bfloat16, torch.float32):
            torch.ops.moxie._pretend_gpu(gpu)
            try:
                told = moxie.explain(recipe, n, k, rows=73, groups=3, device=device, dtype=dtype)
                if device == "cpu" and told.forward.kernel == "sm90_rows":
                    continue  # torch has this product on a GPU only
                problem = gaussian([40, 0, 33], n, k, device=device, dtype=dtype)
                forward, backward = products_of_both(problem, recipe, device)
                assert forward == said([told.forward], device), (gpu, told)
                assert backward == said([told.dgrad, told.wgrad], device), (gpu, told)
            finally:
                torch.ops.moxie._pretend_gpu("")


@pytest.mark.parametrize("recipe", RECIPES)
def test_explain_counts_the_bytes_that_are_kept(recipe, device):
    for rows, groups, n, k in ((73, 3, 64, 96), (500, 1, 48, 80), (10, 40, 33, 50)):
        saved = []
        x = torch.empty(rows, k, dtype=torch.bfloat16, device="meta")
        w = torch.empty(groups, n, k, dtype=torch.bfloat16, device="meta", requires_grad=True)
        offs = torch.empty(groups, dtype=torch.int32, device="meta")
        told = moxie.explain(recipe, n, k, rows=rows, groups=groups, device="cpu", needs_dx=False)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            moxie.grouped_mm(x, w, offs, recipe=recipe)
        assert sum(t.nbytes for t in saved if t.dtype != torch.int32) == told.x_bytes and told.w_bytes == 0


# ---- a graph on disk -----------------------------------------------------------------------------------------------------------

COMPILED = """
import os, sys
import torch, moxie, moxie.nn
from torch._dynamo.utils import counters

for recipe in sys.argv[3:]:  # other recipes first: what a graph carries must not depend on what a process has seen
    moxie.grouped_mm(torch.randn(8, 64), torch.randn(1, 64, 64), recipe=recipe)
torch.manual_seed(1)
layer = moxie.nn.MoE(64, 96, 4, 2, recipe=sys.argv[1])
x = torch.randn(50, 64, requires_grad=True)
y = torch.compile(layer, fullgraph=True)(x)
y.backward(torch.ones_like(y))
torch.save([y.detach(), x.grad, *(p.grad for p in layer.parameters())], sys.argv[2])
print(counters["aot_autograd"]["autograd_cache_hit"])
"""


def test_a_graph_that_another_process_cached_on_disk_gives_the_same_bytes(tmp_path):
    environment = {**ENVIRONMENT, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}

    def run(name: str, *others: str) -> tuple[int, list[torch.Tensor]]:
        done = subprocess.run(
            [sys.executable, "-c", COMPILED, "mxfp8_rceil_128", str(tmp_path / name), *others],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return int(done.stdout.split()[-1]), torch.load(tmp_path / name)

    first_hits, first = run("first.pt")
    second_hits, second = run("second.pt", "mxfp8_floor", "fp8_rowwise", "mxfp8_rceil:weights=128x32", "bf16")
    assert first_hits == 0 and second_hits > 0, "the second process loads the graph of the first"
    assert_same_bytes(second, first)


def test_the_compile_cache_is_tagged_with_the_library(tmp_path):
    file = pathlib.Path(next(path for path in torch.ops.loaded_libraries if "moxie" in path)).stat()
    assert f"moxie-{file.st_size}-{file.st_mtime_ns}" in torch.compiler.config.cache_key_tag


# ---- warnings about recipes that are slower than bf16 --------------------------------------------------------------------------

WARNING = """
import sys, warnings
import torch, moxie
from torch._subclasses.fake_tensor import FakeTensorMode

if len(sys.argv) > 2:
    warnings.simplefilter("ignore")
torch.ops.moxie._pretend_gpu(sys.argv[1], gpus_only=True)
for recipe in ("mxfp8_rceil_128", "bf16", "mxfp8_emulated_rceil"):  # fast, or asked for
    moxie.grouped_mm(torch.randn(8, 64), torch.randn(1, 64, 64), recipe="mxfp8_rceil")  # on a CPU, which promises no speed
    with FakeTensorMode():
        moxie.grouped_mm(torch.empty(8, 64, device="cuda"), torch.empty(1, 64, 64, device="cuda"), recipe=recipe)
print("until now", file=sys.stderr)
for _ in range(3):
    with FakeTensorMode():
        moxie.grouped_mm(torch.empty(8, 64, device="cuda"), torch.empty(1, 64, 64, device="cuda"), recipe="mxfp8_rceil")
"""


def warned(*args: str) -> tuple[str, str]:
    done = subprocess.run([sys.executable, "-c", WARNING, *args], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    return tuple(done.stderr.split("until now"))


def test_a_recipe_that_is_slower_than_bf16_on_this_gpu_warns_once_and_names_another():
    before, after = warned("sm90")
    assert "takes longer than bf16" not in before
    assert after.count("takes longer than bf16 on this GPU") == 1 and "mxfp8_rceil_128 is the recipe for it" in after
    assert "takes longer" not in warned("sm100")[1]


def test_the_warning_is_silenced_as_any_other():
    assert "takes longer" not in warned("sm90", "silent")[1]


# ---- integers that no plan made ------------------------------------------------------------------------------------------------

X, H = torch.randn(64, 256).bfloat16(), torch.randn(64, 512).bfloat16()
W, ENDS = torch.randn(2, 128, 256).bfloat16(), torch.tensor([10, 64], dtype=torch.int32)
OPS = torch.ops.moxie
TAKING_A_SPEC = {
    "_quantize": lambda spec: OPS._quantize(X, ENDS, spec),
    "_swiglu_quantize": lambda spec: OPS._swiglu_quantize(H, None, spec, 0),
    "_swiglu_backward_quantize": lambda spec: OPS._swiglu_backward_quantize(X, H, None, spec, 0),
    "_permute_quantize": lambda spec: OPS._permute_quantize(X, torch.arange(64, dtype=torch.int32), 1, None, spec),
    "_requantize": lambda spec: OPS._requantize(*moxie.quantize_rowwise(X), None, spec),
    "_token_scale": lambda spec: OPS._token_scale(moxie.quantize_rowwise(X)[1], None, 64, 256, spec),
    "_dequantize_tokens": lambda spec: OPS._dequantize_tokens(*moxie.quantize_rowwise(X), spec),
    "grouped_mm.quantized": lambda plan: OPS.grouped_mm.quantized(X, None, W, None, ENDS, plan),
    "grouped_mm.quantized-fp8": lambda plan: OPS.grouped_mm.quantized(
        *moxie.quantize_rowwise(X), *moxie.quantize_weights(W, recipe="mxfp8_rceil")[:2], ENDS, plan
    ),
    "grouped_dgrad.quantized": lambda plan: OPS.grouped_dgrad.quantized(X[:, :128], None, W, None, ENDS, plan),
    "grouped_wgrad.quantized": lambda plan: OPS.grouped_wgrad.quantized(X, None, X, None, 64, ENDS, plan),
}


@pytest.mark.parametrize("name", TAKING_A_SPEC)
def test_an_integer_that_no_plan_made_is_refused_or_harmless(name):
    """Any integer may be passed as a plan or spec: the call works or raises an error that names the op, and stays inside its
    buffers."""
    values = random.Random(1)
    integers = [
        -1,
        0,
        123456789,
        27804141,
        16220,
        2**62,
        -(2**63),
        2**63 - 1,
        *(values.getrandbits(bits) for bits in range(1, 50)),
        *(values.getrandbits(31) for _ in range(60)),
    ]
    for integer in integers:
        try:
            TAKING_A_SPEC[name](integer)
        except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
            assert "INTERNAL ASSERT" not in str(error), (integer, error)
    with pytest.raises(ValueError, match=": a spec or plan must be an integer that pack.. made, got -1"):
        TAKING_A_SPEC[name](-1)


# ---- what a single pass must refuse --------------------------------------------------------------------------------------------


def test_a_bias_of_another_dtype_is_refused():
    with pytest.raises(TypeError, match="grouped_fwd: bias must be torch.bfloat16 or torch.float32, got torch.float16"):
        moxie.grouped_fwd(X, None, W, None, ENDS, recipe="bf16", bias=torch.zeros(128).half())


def test_num_rows_must_be_the_rows_of_operands_that_are_not_quantized():
    with pytest.raises(ValueError, match="grouped_wgrad: num_rows must be the 64 rows of dy and x, got 10"):
        moxie.grouped_wgrad(X, None, X, None, 10, recipe="bf16")


def test_offs_are_checked_where_there_are_no_rows():
    with pytest.raises(ValueError, match="grouped_fwd: offs must not pass the end of the 0 rows, got 10"):
        moxie.grouped_fwd(X[:0], None, W, None, ENDS, recipe="bf16")


def test_explain_without_groups_is_a_call_without_offs():
    saved, w = [], W[:1].detach().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
        moxie.grouped_mm(X[:5], w, recipe="mxfp8_rceil")
    told = moxie.explain("mxfp8_rceil", 128, 256, rows=5, device="cpu", needs_dx=False)
    assert told.x_bytes == sum(t.nbytes for t in saved)
    for bad in ({"groups": 0}, {"groups": 1025}, {"dtype": torch.float16}, {"device": "meta"}, {"rows": 2**40}):
        with pytest.raises(ValueError, match="explain: "):
            moxie.explain("mxfp8_rceil", 128, 256, **{"device": "cpu", **bad})
