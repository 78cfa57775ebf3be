"""quantize_: which names it converts, with which config, and what it reports."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moxie
from moe_models import DIM, TitanExperts, batch, make
from test_convert import GROUPED, LINEAR, MODES, TITAN

# ---- names ------------------------------------------------------------------------------------------------------------------


def converted_with(keys: dict) -> dict[str, str]:
    report = moxie.quantize_(make(), moxie.FqnToConfig(keys))
    return {entry.fqn: moxie.Recipe.from_name(entry.conversion.recipe).rule for entry in report.entries if entry.conversion}


def test_the_more_exact_key_wins():
    rules = {rule: moxie.MXFP8GroupedMMConfig(scale_calculation_mode=rule) for rule in ("floor", "ceil", "even", "rceil")}
    w1, w3, w2 = TITAN
    found = converted_with({"re:.*moe.experts": rules["even"], "re:.*experts.w[12]": rules["ceil"], w1: rules["floor"]})
    assert found == {w1: "floor", w2: "ceil", w3: "even"}
    # An exact module name wins over every pattern, None leaves a target alone, and _default comes last.
    found = converted_with({"re:.*": rules["even"], "layers.0.moe.experts": rules["ceil"], w2: None, "layers.0.attention": None})
    assert found[w1] == found[w3] == "ceil" and w2 not in found
    assert not any("attention" in name for name in found) and found["output"] == "even"
    found = converted_with({"_default": "mxfp8_floor", "re:.*experts": None})
    assert found["layers.0.attention.wk"] == "floor" and not set(TITAN) & set(found)
    # Among exact module names the innermost wins; among patterns, the first that matches.
    assert converted_with({"layers.0": None, "layers.0.moe.experts": rules["ceil"]}) == dict.fromkeys(TITAN, "ceil")
    assert set(converted_with({"re:.*w1": rules["ceil"], "re:.*w.*": rules["floor"]}).values()) == {"ceil", "floor"}


def test_filter_fn_chooses_modules():
    model = make(layers=2)
    report = moxie.quantize_(model, GROUPED, filter_fn=lambda module, fqn: "experts" in fqn and "layers.1" in fqn)
    assert report.converted == [name.replace("layers.0", "layers.1") for name in TITAN]
    report = moxie.quantize_(make(), LINEAR, lambda module, fqn: isinstance(module, nn.Linear))
    assert len(report.converted) == 8 and "output" in report.converted  # filter_fn overrides the skip list


def test_the_skip_list_is_that_of_language_models_and_can_be_changed():
    report = moxie.quantize_(make(), LINEAR)
    skipped = {fqn for fqn, reason in report.left_alone.items() if reason == "on the skip list"}
    assert skipped == {"output", "layers.0.moe.router.gate", "layers.0.attention.wk", "layers.0.attention.wv"}
    assert len(moxie.quantize_(make(), LINEAR, skip=()).converted) == 8
    report = moxie.quantize_(make(), LINEAR, skip=[*moxie.LM_SKIP, ".*shared_expert.*"])
    assert report.converted == ["layers.0.attention.wq", "layers.0.attention.wo"]


def test_layers_of_torch_that_are_no_experts_are_left_alone():
    model = nn.ModuleDict({"conv": nn.Conv1d(8, 8, 3), "attention": nn.MultiheadAttention(64, 4), "up": nn.Linear(64, 64)})
    report = moxie.quantize_(model, "mxfp8_rceil")
    assert report.converted == ["up"] and "multiplied by its owner" in report.left_alone["attention.out_proj"]
    model["attention"](*[torch.randn(3, 2, 64)] * 3)


def test_integers_are_left_alone():
    model = nn.Module()
    model.ids, model.up = nn.Parameter(torch.ones(2, 3, 4, dtype=torch.int64), requires_grad=False), nn.Linear(64, 64)
    report = moxie.quantize_(model, "mxfp8_rceil")
    assert report.converted == ["up"] and report.left_alone == {"ids": "its dtype is torch.int64"}


def test_a_matrix_is_converted_if_it_is_named():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(32, 64))

        def forward(self, x):
            return F.linear(x, self.table)

    model, x = Tied(), torch.randn(4, 64)
    report = moxie.quantize_(model, moxie.FqnToConfig({"table": "mxfp8_rceil"}))
    assert report.converted == ["table"]
    assert torch.equal(model(x), moxie.grouped_mm(x, model.table.detach()[None], recipe="mxfp8_rceil"))


def test_modules_of_our_own_get_the_recipe():
    model = moxie.nn.MoE(64, 96, num_experts=4, top_k=2, shared_hidden_dim=32, recipe="bf16")
    before, state = model.experts.recipe, list(model.state_dict())
    x = torch.randn(3, 7, 64)
    reference = model(x)
    report = moxie.quantize_(model, moxie.MXFP8GroupedMMConfig(weight_cache=True))
    assert report.converted == ["experts", "shared.experts"] and "experts 4x192x64  mxfp8_rceil, cached" in str(report)
    assert model.experts.cache13 is not None and list(model.state_dict()) == state
    assert not torch.equal(model(x), reference) and report.unused == []
    moxie.unquantize_(model)
    assert model.experts.recipe == before and model.experts.cache13 is None and torch.equal(model(x), reference)


# ---- the report -------------------------------------------------------------------------------------------------------------


def test_the_report_prints_the_tree():
    text = str(moxie.quantize_(make(), "mxfp8_rceil_128"))
    assert text.splitlines()[0].startswith("7 of 11 converted: ")
    lines = [line.split(maxsplit=1) for line in text.splitlines()]
    assert ["w1", "parameter 4x48x64  mxfp8_rceil_128"] in lines
    assert ["wk", "linear 64x64  left alone: on the skip list"] in lines
    indent = {line.split()[0]: len(line) - len(line.lstrip()) for line in text.splitlines()[1:]}
    assert [indent[name] for name in ("layers", "moe", "experts", "w1", "output")] == [2, 6, 8, 10, 2]


def test_what_nothing_uses_is_warned_of_once():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts, self.offsets = TitanExperts(), nn.Parameter(torch.randn(2, 32, DIM))

        def forward(self, x, offs):
            return self.experts(x + self.offsets[0, :8], offs)

    model = Odd().bfloat16()
    report = moxie.quantize_(model, GROUPED)
    x, offs = torch.randn(8, DIM, dtype=torch.bfloat16), torch.tensor([1, 2, 3, 8], dtype=torch.int32)
    with pytest.warns(UserWarning, match="offsets converted, but the model's forward never multiplied"):
        model(x, offs)
    assert report.unused == ["offsets"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x, offs)


def test_what_is_converted_no_longer_is_not_warned_of():
    model = make(layers=2)
    report = moxie.quantize_(model, "mxfp8_rceil")
    moxie.unquantize_(model.layers[0])
    moxie.quantize_(model.layers[1], "mxfp8_floor")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(batch())
    assert report.unused == []


def test_layers_that_are_compiled_are_not_warned_of_and_share_a_graph():
    torch._dynamo.reset()
    model = make(layers=3)
    moxie.quantize_(model, "mxfp8_rceil")
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for i, layer in enumerate(model.layers):
        if i == 0:
            layer.compile(backend=backend, fullgraph=True)
        else:
            model.layers[i] = torch.compile(layer, backend=backend, fullgraph=True)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        model(batch())
    assert len(graphs) == 1
    assert sum("moxie.grouped_mm" in str(node.target) for node in graphs[0].graph.nodes) == 7


def test_converting_again_replaces_the_config():
    model = make()
    moxie.quantize_(model, "mxfp8_rceil")
    report = moxie.quantize_(model, "mxfp8_floor")
    assert len(report.converted) == 7 and "mxfp8_floor" in str(report) and "rceil" not in str(report)
    assert len(model._forward_hooks) == 1


def test_what_an_earlier_call_converted_stays_and_is_reported():
    model = make()
    moxie.quantize_(model, GROUPED)
    report = moxie.quantize_(model, LINEAR)
    assert not set(TITAN) & set(report.converted) and report.left_alone[TITAN[0]] == "MXLinearConfig is for linears"
    assert str(report).startswith("4 of 11 converted and 3 before: ")
    assert "parameter 4x48x64  mxfp8_rceil as before: MXLinearConfig is for linears" in str(report)
    model(batch())
    assert report.unused == []


def test_a_compiled_model_can_be_converted():
    torch._dynamo.reset()
    model = torch.compile(make(), backend="aot_eager")
    before = model(batch())
    assert moxie.quantize_(model, "mxfp8_rceil").converted == MODES["both"][1]
    after = model(batch())
    assert not torch.equal(after, before) and torch.equal(after, model._orig_mod(batch()))


@pytest.mark.parametrize("wrapper", ("base_layer", "original_module", "modules_to_save.default"))
def test_the_skip_list_sees_through_the_wrappers_of_peft(wrapper):
    inner = nn.Linear(64, 64)
    for name in reversed(wrapper.split(".")):
        inner = nn.ModuleDict({name: inner})
    model = nn.ModuleDict({"up_proj": nn.Linear(64, 64), "lm_head": inner, "k_proj": copy.deepcopy(inner)})
    assert moxie.quantize_(model, "mxfp8_rceil").converted == ["up_proj"]
