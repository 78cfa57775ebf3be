"""The experts implementation `moxie` of transformers: routing, ids of other ranks, compile, and fallbacks. "Seams" in names are
transformers' own calls of torch products, which Moxie intercepts once the weights are converted."""

import pytest
import torch

pytest.importorskip("transformers")
from transformers.integrations import moe

if not hasattr(moe, "ALL_EXPERTS_FUNCTIONS"):
    pytest.skip("transformers before 5 has no registry of experts", allow_module_level=True)

import moxie
import moxie.hf
from hf_models import gpt_oss, mixtral, step, tokens

RECIPE = "mxfp8_rceil"
EXPERTS = ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"]


def sqnr(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double(), b.double()
    return (10 * torch.log10(b.square().sum() / ((a - b).square().sum() + 1e-300))).item()


def fused(model):
    model.set_experts_implementation("moxie")
    return model


def count_fused(monkeypatch) -> list:
    calls = []
    real = moxie.hf.expert_mlp
    monkeypatch.setattr(moxie.hf, "expert_mlp", lambda *args, **kwargs: calls.append(kwargs["recipe"]) or real(*args, **kwargs))
    return calls


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_without_conversion_the_layer_computes_what_grouped_mm_does(dtype, device, monkeypatch):
    calls = count_fused(monkeypatch)
    loss, grads = step(fused(mixtral(dtype, device)))
    expected, expected_grads = step(mixtral(dtype, device))
    assert calls == ["bf16"] and abs(loss - expected) < 2e-3 * expected  # bf16 rounds to 2^-9
    for name in EXPERTS:
        assert sqnr(grads[name], expected_grads[name]) > 35, name


def test_the_recipe_is_that_of_the_conversion_and_agrees_with_the_seams(device, monkeypatch):
    calls = count_fused(monkeypatch)
    model, seams = fused(mixtral(device=device)), mixtral(device=device)
    for one in (model, seams):
        moxie.quantize_(one, RECIPE)
    loss, grads = step(model)
    expected, expected_grads = step(seams)
    assert len(calls) == 1 and moxie.Recipe.from_name(calls[0]) == moxie.Recipe.from_name(RECIPE)
    assert torch.allclose(loss, expected, rtol=1e-5)  # forward rounds in the same places either way
    # Gradients differ by FP8's error, about 25 dB: the fused layer weighs dy by routing weights after quantizing it,
    # transformers' own code before.
    for name in EXPERTS:
        assert sqnr(grads[name], expected_grads[name]) > 20, name
    assert set(EXPERTS) <= set(moxie.participation(model).check().backward)


def test_a_registered_recipe_holds_where_nothing_is_converted(device, monkeypatch):
    moxie.hf.register("moxie_for_test", recipe="mxfp8_floor")
    calls = count_fused(monkeypatch)
    model = mixtral(device=device)
    model.set_experts_implementation("moxie_for_test")
    step(model)
    assert calls == ["mxfp8_floor"]
    with pytest.raises(ValueError, match="recipe"):
        moxie.hf.register("moxie_for_test", recipe="mxfp9")


def test_from_config_takes_the_name(monkeypatch):
    from transformers import AutoModelForCausalLM

    calls = count_fused(monkeypatch)
    model = AutoModelForCausalLM.from_config(mixtral().config, experts_implementation="moxie")
    step(model)
    assert calls == ["bf16"]


@pytest.mark.parametrize("parallel", (True, False))
def test_sentinels_of_expert_parallelism_add_nothing(parallel, device):
    experts = fused(mixtral(device=device)).model.layers[0].mlp.experts
    ids = torch.randint(0, 4, (10, 2), device=device)
    if parallel:
        ids[3, 0], ids[5] = 4, 4  # with 4 experts here, id 4 stands for an expert on another rank
    experts._is_expert_parallel = parallel
    results = []
    for name in ("moxie", "grouped_mm"):
        experts.config._experts_implementation = name
        torch.manual_seed(1)
        x, weights = torch.randn(10, 64, device=device, requires_grad=True), torch.rand(10, 2, device=device, requires_grad=True)
        y = experts(x, ids, weights)
        y.square().sum().backward()
        results.append((y, x.grad, weights.grad))
    for ours, theirs in zip(*results):
        assert sqnr(ours, theirs) > 35
    if parallel:
        y, dx, dweights = results[0]
        assert not y[5].any() and not dx[5].any() and not dweights[5].any() and dweights[3, 0] == 0


def test_an_activation_that_is_not_fused_runs_through_the_seams_with_a_word(device):
    model = fused(mixtral(device=device, hidden_act="gelu"))
    moxie.quantize_(model, RECIPE)
    with pytest.warns(UserWarning, match="MixtralExperts runs as grouped_mm, .*its activation is none that Moxie fuses"):
        loss, _ = step(model)
    moxie.participation(model).check()
    seams = mixtral(device=device, hidden_act="gelu")
    moxie.quantize_(seams, RECIPE)
    assert torch.equal(loss, step(seams)[0])


def test_a_recipe_that_experts_cannot_run_in_is_refused(device):
    """The fallback, transformers' own products, would run unquantized here, because no weight is converted: refused."""
    moxie.hf.register("moxie_rceil", recipe=RECIPE)
    model = mixtral(device=device, hidden_act="gelu")
    model.set_experts_implementation("moxie_rceil")
    with pytest.raises(ValueError, match="MixtralExperts cannot run through the fused layer in mxfp8_rceil: its activation"):
        step(model)


def test_weights_converted_in_two_ways_run_through_the_seams_with_a_word(device):
    model = fused(mixtral(device=device))
    moxie.quantize_(model, moxie.FqnToConfig({EXPERTS[0]: "mxfp8_rceil", EXPERTS[1]: "mxfp8_floor"}))
    with pytest.warns(UserWarning, match="its two weights are converted with different recipes"):
        step(model)
    moxie.participation(model).check()


@pytest.mark.parametrize("converted", (False, True))
def test_gpt_oss_agrees_with_the_seams(converted, device, monkeypatch):
    """In gpt-oss, expert weights are transposed and interleaved, and there are biases and a clamped activation."""
    model, seams = fused(gpt_oss(device=device)), gpt_oss(device=device)
    for one in (model, seams):
        with torch.no_grad():
            one.model.layers[0].mlp.experts.gate_up_proj_bias.uniform_(-1, 1, generator=torch.Generator(device).manual_seed(1))
        if converted:
            moxie.quantize_(one, RECIPE)
    calls = count_fused(monkeypatch)
    loss, grads = step(model)
    assert [name.partition(":")[0] for name in calls] == [RECIPE if converted else "bf16"]
    expected, expected_grads = step(seams)
    assert abs(loss - expected) < 5e-3 * expected
    for name in ("gate_up_proj", "down_proj"):
        name = f"model.layers.0.mlp.experts.{name}"
        assert sqnr(grads[name], expected_grads[name]) > (18 if converted else 30), name


def test_a_cache_of_interleaved_weights_is_not_taken_and_is_warned_of(device):
    model, plain = (fused(gpt_oss(device=device)) for _ in range(2))
    cached = moxie.MXFP8GroupedMMConfig(weight_cache="kn")
    moxie.quantize_(model, moxie.FqnToConfig({r"re:.*\.experts": cached}))
    moxie.quantize_(plain, moxie.FqnToConfig({r"re:.*\.experts": moxie.MXFP8GroupedMMConfig()}))
    with pytest.warns(
        UserWarning, match=r"gate_up_proj: gates and ups alternate in its weight cache.*convert it without weight_cache"
    ):
        loss, grads = step(model)
    expected_loss, expected = step(plain)
    assert torch.equal(loss, expected_loss) and all(torch.equal(grads[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("implementation", ("grouped_mm", "moxie"))
def test_a_compiled_model_is_quantized_whatever_its_dtype(dtype, implementation):
    """In a graph, transformers multiplies f32 experts by an op of its own, transformers::grouped_mm_fallback, which must not
    bypass Moxie."""
    torch._dynamo.reset()
    model = mixtral(dtype)
    model.set_experts_implementation(implementation)
    report = moxie.quantize_(model, RECIPE)
    expected, expected_grads = step(model)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    loss, grads = step(model, torch.compile(model, fullgraph=True, backend=backend))
    assert torch.equal(loss, expected) and torch.equal(grads[EXPERTS[0]], expected_grads[EXPERTS[0]])
    assert report.unused == [] and moxie.participation(model).check().backward == report.converted
    called = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert (
        sum("moxie.expert_mlp" in name or "moxie.grouped_mm" in name for name in called)
        == {"moxie": 3, "grouped_mm": 4}[implementation]
    )
    assert not any("fallback" in name for name in called)


def test_batched_mm_beyond_its_limit_names_the_parameter_and_the_way_out():
    """batched_mm copies the weights for each pair of token and expert. Here these are 1152 groups, more than one product
    takes."""
    model = mixtral()
    model.set_experts_implementation("batched_mm")
    moxie.quantize_(model, RECIPE)
    ids = tokens().repeat(9, 1)  # 576 tokens, 1152 pairs
    with pytest.raises(ValueError, match=r"experts.gate_up_proj: .*got 1152: .*set_experts_implementation\(\"grouped_mm\"\)"):
        model(input_ids=ids)
    model.set_experts_implementation("moxie")
    model(input_ids=ids)


def test_a_graph_is_not_made_again_for_every_step():
    torch._dynamo.reset()
    model = fused(mixtral(torch.bfloat16))
    moxie.quantize_(model, RECIPE)
    call = torch.compile(model, fullgraph=True, backend="eager")
    step(model, call)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            step(model, call)
