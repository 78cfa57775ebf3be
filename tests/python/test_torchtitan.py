"""moxie.torchtitan with TorchTitan 0.3: overrides and converters (docs/TORCHTITAN.md). `make titan` runs these tests."""

import dataclasses
import os
import pathlib
import re
import socket
import subprocess
import sys

import pytest
import torch
from torch import nn

import moxie
import ranks
import titan_cpu
from grouped_reference import sqnr

pytest.importorskip("torchtitan", reason="TorchTitan is not installed: make titan", exc_type=ImportError)
overrides = pytest.importorskip(
    "torchtitan.config.override", reason="this is not TorchTitan 0.3, or torch is older than it needs", exc_type=ImportError
)

from torchtitan.models.common.linear import ScaledBiasRowwiseLinear
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
from torchtitan.models.deepseek_v3 import model_registry
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

import titan_dispatch_cases
from moxie.torchtitan import (
    MoxieGroupedExpertsConverter,
    MoxieLinearConverter,
    MoxieTokenDispatcher,
    MoxieTokenDispatcherConverter,
    dispatch,
    experts,
    linears,
)
from moxie.torchtitan.replace import quantized_experts

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECIPE = "mxfp8_rceil_128"


def spec(*converters):
    return model_registry("debugmodel", converters=list(converters))


def build(config):
    with torch.device("meta"):
        return config.build()


def apply(*imports):
    """Applies overrides to the debug model's config, as --override.imports does. Returns the config and the lines that were
    logged."""
    config = spec().model
    return config, overrides.apply_overrides(overrides.OverrideConfig(imports=list(imports)), config)


def small_experts(config_class=GroupedExperts.Config, **kwargs):
    return config_class(dim=64, hidden_dim=96, num_experts=4, **kwargs)


def with_weights(module, device):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.1)
    return module.to(device, torch.bfloat16)


def test_experts_are_the_fused_layer_and_keep_their_names(device):
    stock = with_weights(small_experts().build(), device)
    module = quantized_experts(small_experts(), RECIPE).build().to(device, torch.bfloat16)
    module.load_state_dict(stock.state_dict())
    assert list(dict(module.named_parameters())) == list(dict(stock.named_parameters()))
    own = moxie.nn.GroupedExperts(64, 96, 4, recipe=RECIPE, device=device, dtype=torch.bfloat16)
    own.load_weights_(w1=stock.w1_EFD, w2=stock.w2_EDF, w3=stock.w3_EFD)
    x = torch.randn(50, 64, device=device, dtype=torch.bfloat16)
    counts = torch.tensor([20, 0, 13, 17], device=device)
    offs = counts.cumsum(0, dtype=torch.int32)
    y, expected = module(x, counts), own(x, offs)
    assert torch.equal(y, expected) and 20 < sqnr(y, stock(x, counts)) < 60
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy)
    assert torch.equal(torch.cat([module.w1_EFD.grad, module.w3_EFD.grad], dim=1), own.w13.grad)
    assert torch.equal(module.w2_EDF.grad, own.w2.grad)


def test_experts_with_another_mlp_keep_it_and_multiply_through_moxie(monkeypatch):
    config = small_experts(GptOssGroupedExperts.Config)
    module = with_weights(quantized_experts(config, RECIPE).build(), "cpu")
    assert type(module).forward is GptOssGroupedExperts.forward and type(module).__name__ == "MoxieGptOssGroupedExperts"
    a, w = torch.randn(8, 64, dtype=torch.bfloat16), torch.randn(2, 96, 64, dtype=torch.bfloat16)
    offs = torch.tensor([3, 8], dtype=torch.int32)
    y = module._grouped_mm(A=a, B_t=w.transpose(-2, -1), offs=offs)
    assert torch.equal(y, moxie.grouped_mm(a, w, offs, recipe=RECIPE))


@pytest.mark.parametrize("how", ("overrides", "converters"))
def test_the_state_dict_is_that_of_the_stock_model(how, caplog):
    caplog.set_level("INFO")
    stock = build(spec().model)
    if how == "overrides":
        config, lines = apply(("moxie.torchtitan.experts", {"recipe": RECIPE}), "moxie.torchtitan.linears")
        # The log names the five groups of experts and each linear.
        assert len(lines) == 5 + sum(isinstance(module, nn.Linear) for module in stock.modules())
        names = ("moxie.torchtitan.experts", "moxie.torchtitan.linears")
    else:
        config = spec(MoxieGroupedExpertsConverter.Config(recipe=RECIPE), MoxieLinearConverter.Config()).model
        names = ("MoxieGroupedExpertsConverter", "MoxieLinearConverter")
    model = build(config)
    model.verify_module_protocol()
    assert {name: p.shape for name, p in model.state_dict().items()} == {name: p.shape for name, p in stock.state_dict().items()}
    converted = {name for name, module in model.named_modules() if isinstance(module, moxie.MXLinear)}
    all_linears = {name for name, module in stock.named_modules() if isinstance(module, nn.Linear)}
    assert all_linears - converted >= {"lm_head", "layers.1.moe.router.gate"} and "layers.0.feed_forward.w1" in converted
    own = [type(module).__name__ for module in model.modules() if isinstance(module, GroupedExperts)]
    assert own == ["MoxieGroupedExperts"] * 5
    report = [record.message for record in caplog.records if record.message.startswith(tuple(f"{name}: " for name in names))]
    assert report == [
        f"{names[0]}: 5 of 5 experts in {RECIPE}",
        f"{names[1]}: {len(converted)} of {len(all_linears)} linears in {RECIPE}; left alone: "
        f"{len(all_linears) - len(converted)} on the skip list",
    ]


def test_fqns_and_skip_choose_by_name():
    config, _ = apply(("moxie.torchtitan.linears", {"fqns": ["shared_experts"], "skip": [".*w3"]}))
    converted = {name for name, module in build(config).named_modules() if isinstance(module, moxie.MXLinear)}
    assert converted == {f"layers.{i}.moe.shared_experts.{w}" for i in range(1, 6) for w in ("w1", "w2")}
    config = spec(MoxieGroupedExpertsConverter.Config(fqns=["layers.3."])).model
    names = {name: type(module).__name__ for name, module in build(config).named_modules() if isinstance(module, GroupedExperts)}
    assert [name for name, kind in names.items() if kind != "GroupedExperts"] == ["layers.3.moe.routed_experts.inner_experts"]


@pytest.mark.parametrize(
    "kwargs, error, message",
    [
        ({"fqns": ["atention"]}, ValueError, "moxie.torchtitan.linears: 'atention' in fqns is part of no name"),
        ({"fqns": "attention"}, TypeError, "moxie.torchtitan.linears: fqns must be a list of texts, got 'attention'"),
        ({"skip": ["wo"]}, ValueError, "moxie.torchtitan.linears: 'wo' in skip matches the whole name of no linear"),
        ({"skip": ["*wo"]}, ValueError, "moxie.torchtitan.linears: .* in skip is no regular expression"),
        ({"skip": [".*"]}, ValueError, "nothing to replace: the model has .* linears; left alone: .* on the skip list"),
        ({"recipe": "mxfp9"}, ValueError, "moxie.torchtitan.linears: .*mxfp9"),
    ],
)
def test_a_mistake_is_refused_and_the_next_call_is_right(kwargs, error, message):
    with pytest.raises(error, match=message):
        apply(("moxie.torchtitan.linears", kwargs))
    config, _ = apply(("moxie.torchtitan.linears", {"fqns": ["layers.0.attention.wo"]}))
    converted = [name for name, module in build(config).named_modules() if isinstance(module, moxie.MXLinear)]
    assert converted == ["layers.0.attention.wo"]


def test_a_linear_with_a_forward_of_its_own_is_left_alone(caplog):
    caplog.set_level("INFO")
    config = spec().model
    attention = config.layers[0].attention
    attention.wo = ScaledBiasRowwiseLinear.Config(
        **{f.name: getattr(attention.wo, f.name) for f in dataclasses.fields(attention.wo)}
    )
    MoxieLinearConverter.Config(fqns=["layers.0.attention.w"]).build().convert(config)
    assert "1 ScaledBiasRowwiseLinear has a forward of its own" in caplog.text
    assert type(attention.wo) is ScaledBiasRowwiseLinear.Config


def test_overrides_can_be_imported_by_name():
    assert [one.__name__ for one in (experts, linears, dispatch)] == ["experts", "linears", "dispatch"]
    assert {f"moxie.torchtitan.{name}" for name in ("experts", "linears", "dispatch")} <= overrides._REGISTRY.keys()


def test_the_snippet_of_the_page_runs():
    page = (ROOT / "docs" / "TORCHTITAN.md").read_text()
    (snippet,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    namespace = {}
    exec(snippet, namespace)
    assert any(isinstance(module, moxie.MXLinear) for module in build(namespace["spec"].model).modules())


def test_an_override_of_what_holds_linears_is_refused_beside_linears():
    with pytest.raises(ValueError, match="Nested overrides are order-dependent"):
        apply("moxie.torchtitan.linears", "torchtitan.overrides.fused_swiglu.fused_swiglu")
    apply("moxie.torchtitan.experts", "torchtitan.overrides.fused_swiglu.fused_swiglu")


def dispatchers_of(config):
    return [dispatcher for _, dispatcher, _, _ in config.traverse(MoxieTokenDispatcher.Config)]


@pytest.mark.parametrize("order", (("experts", "dispatch"), ("dispatch", "experts")))
@pytest.mark.parametrize("how", ("overrides", "converters"))
def test_dispatchers_hand_tokens_to_fused_experts_in_either_order(how, order, caplog):
    caplog.set_level("INFO")
    kinds = {"experts": MoxieGroupedExpertsConverter, "dispatch": MoxieTokenDispatcherConverter}
    if how == "overrides":
        config, _ = apply(*(f"moxie.torchtitan.{name}" for name in order))
        name = "moxie.torchtitan.dispatch"
    else:
        config, name = spec(*(kinds[name].Config() for name in order)).model, "MoxieTokenDispatcherConverter"
    assert [dispatcher.experts_take_tokens for dispatcher in dispatchers_of(config)] == [True] * 5
    assert f"{name}: 5 of 5 token dispatchers, wire fp8 where the recipe allows it" in caplog.messages
    build(config).verify_module_protocol()


def test_dispatchers_beside_other_experts_move_rows():
    alone, _ = apply("moxie.torchtitan.dispatch")
    assert [dispatcher.experts_take_tokens for dispatcher in dispatchers_of(alone)] == [False] * 5
    some, _ = apply(
        ("moxie.torchtitan.dispatch", {"wire": "unquantized", "fqns": ["layers.2.", "layers.3."]}),
        ("moxie.torchtitan.experts", {"fqns": ["layers.3."]}),
    )
    assert [(one.experts_take_tokens, one.wire) for one in dispatchers_of(some)] == [
        (False, "unquantized"),
        (True, "unquantized"),
    ]


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"wire": "fp9"}, "moxie.torchtitan.dispatch: wire must be fp8 or unquantized, got 'fp9'"),
        ({"wire": "fp8", "recipe": "bf16"}, "wire fp8 takes recipes that quantize all three passes"),
        ({"fqns": ["layer.2"]}, "moxie.torchtitan.dispatch: 'layer.2' in fqns is part of no name"),
    ],
)
def test_a_dispatch_that_cannot_be_is_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        apply(("moxie.torchtitan.dispatch", kwargs))
    apply("moxie.torchtitan.dispatch")


@pytest.mark.parametrize("recipe", ("", RECIPE))
def test_without_a_group_the_dispatcher_gives_what_torchtitans_gives(recipe):
    def block(dispatcher):
        config = small_experts()
        module = RoutedExperts.Config(
            inner_experts=quantized_experts(config, recipe) if recipe else config, token_dispatcher=dispatcher
        ).build()
        torch.manual_seed(0)
        return with_weights(module, "cpu")

    sizes = dict(num_experts=4, top_k=2)
    stock = block(LocalTokenDispatcher.Config(**sizes))
    ours = block(MoxieTokenDispatcher.Config(**sizes, experts_take_tokens=bool(recipe)))
    x = torch.randn(2, 9, 64).bfloat16()
    scores, ids = torch.rand(2, 9, 4).topk(2, dim=-1)
    counts = torch.bincount(ids.flatten(), minlength=4)
    y, expected = ours(x, scores, ids, counts), stock(x, scores, ids, counts)
    # With a recipe, Moxie weighs and adds rows in one op. TorchTitan rounds each weighted row to bf16 before it adds.
    assert torch.equal(y, expected) if not recipe else sqnr(y, expected) > 45


@pytest.fixture(scope="module")
def results_of_two_ranks(tmp_path_factory):
    return ranks.run([f"titan_dispatch_cases.{name}" for name in titan_dispatch_cases.NAMES], 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", titan_dispatch_cases.NAMES)
def test_over_two_ranks(case, results_of_two_ranks):
    wrong = results_of_two_ranks[f"titan_dispatch_cases.{case}"]
    assert not wrong, "\n".join(f"rank {rank}: {text}" for rank, text in wrong.items())


def losses(folder, config, *imports, ranks=1, flags=()):
    """Runs TorchTitan's own trainer on the CPU. Returns the losses that its log shows, and the log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "import titan_cpu; titan_cpu.main()", "--module", "titan_cpu", "--config", config, *flags]
    command += ["--override.imports", "titan_cpu.sdpa", *imports]
    environment = {
        **os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path), "HF_HOME": str(folder), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    children = [
        subprocess.Popen(
            command, cwd=folder, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL, stderr=subprocess.STDOUT,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        log = children[0].communicate(timeout=900)[0]
        codes = [child.wait(timeout=100) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert codes == [0] * ranks, log[-5000:]
    return [float(loss) for loss in re.findall(r"loss: +\x1b?\[?\S*?(\d+\.\d+)", log)], log


MOXIE = (f'moxie.torchtitan.experts={{"recipe": "{RECIPE}"}}', "moxie.torchtitan.linears")


@pytest.mark.parametrize("config", ("deepseek_v3", "qwen3_moe"))
def test_ten_steps_of_the_full_trainer_stay_within_a_thousandth_of_bf16(config, tmp_path):
    titan_cpu.write_assets(tmp_path)
    expected, _ = losses(tmp_path, config)
    got, log = losses(tmp_path, config, *MOXIE)
    assert len(expected) == len(got) == 10 and got != expected
    worst = max(abs(one / other - 1) for one, other in zip(got, expected))
    print(f"\n{config}: worst difference of 10 losses {100 * worst:.3f} %")
    assert worst < 1e-3
    for name in ("experts", "linears"):
        assert re.search(rf"moxie.torchtitan.{name}: \d+ of \d+ {name} in {RECIPE}", log)


@pytest.mark.parametrize("parallelism", ("expert", "tensor"))
def test_two_ranks_stay_within_a_thousandth_of_bf16(parallelism, tmp_path):
    titan_cpu.write_assets(tmp_path)
    flags = (f"--parallelism.{parallelism}_parallel_degree", "2", "--training.steps", "3")
    expected, _ = losses(tmp_path, "deepseek_v3", ranks=2, flags=flags)
    got, _ = losses(tmp_path, "deepseek_v3", *MOXIE, ranks=2, flags=flags)
    assert len(expected) == len(got) == 3 and got != expected
    worst = max(abs(one / other - 1) for one, other in zip(got, expected))
    print(f"\n{parallelism} parallel: worst difference of 3 losses {100 * worst:.3f} %")
    assert worst < 1e-3


@pytest.mark.parametrize("beside", ((), MOXIE), ids=("alone", "with_experts_and_linears"))
def test_ten_steps_over_two_ranks_with_moxies_dispatch_send_fewer_bytes(beside, tmp_path):
    titan_cpu.write_assets(tmp_path)
    flags = ("--parallelism.expert_parallel_degree", "2")
    expected, log = losses(tmp_path, "deepseek_v3", ranks=2, flags=flags)
    got, log_of_ours = losses(tmp_path, "deepseek_v3", *beside, "moxie.torchtitan.dispatch", ranks=2, flags=flags)
    assert len(expected) == len(got) == 10 and got != expected
    worst = max(abs(one / other - 1) for one, other in zip(got, expected))
    sent, of_titan = (int(re.search(r"bytes to other ranks: (\d+)", text)[1]) for text in (log_of_ours, log))
    print(f"\nworst difference of 10 losses {100 * worst:.3f} %; {sent} bytes of {of_titan}: {sent / of_titan:.3f}")
    assert worst < 1e-3
    assert 0 < sent < 0.75 * of_titan
    assert re.search(r"moxie.torchtitan.dispatch: 2 of 2 token dispatchers, wire fp8", log_of_ours)
