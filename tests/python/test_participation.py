"""moxie.participation: which converted weights took part in the last step, and which weights are left unconverted and why."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import moxie
import moxie.steps
from moe_models import DIM, EXPERTS, TitanExperts

OFFS = torch.tensor([7, 7, 30, 40], dtype=torch.int32)


class Branches(nn.Module):
    """A model of two linears and experts; `way` says which of the linears a forward uses."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.experts = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), TitanExperts()

    def forward(self, x, way="a"):
        return self.experts(self.a(x) if way == "a" else self.b(x), OFFS.to(x.device))


EXPERT_NAMES = ["experts.w1", "experts.w3", "experts.w2"]


def make(device) -> Branches:
    model = Branches().to(device)
    moxie.quantize_(model, "mxfp8_rceil")
    return model


def test_only_the_last_step_counts(device):
    model, x = make(device), torch.randn(40, DIM, device=device)
    assert moxie.participation(model).missing == ["a", "b", *EXPERT_NAMES]
    model(x, "b").sum().backward()
    model(x, "a")
    part = moxie.participation(model)
    assert part.forward == ["a", *EXPERT_NAMES] and part.backward == [] and part.missing == ["b"]
    model(x, "b").sum().backward()
    part = moxie.participation(model)
    assert part.forward == part.backward == ["b", *EXPERT_NAMES] and part.missing == ["a"]
    assert str(part).splitlines()[0] == "of 5 converted, 4 took part in forward, 4 in backward"
    with pytest.raises(RuntimeError, match="participation: a converted, but not multiplied in the last step"):
        part.check()


def test_a_step_begins_though_the_forward_of_the_model_is_not_called(device):
    model, x = make(device), torch.randn(40, DIM, device=device)
    model.forward(x, "a").sum().backward()
    model.forward(x, "b").sum().backward()
    assert moxie.participation(model).missing == ["a"]


def test_backward_without_gradients_is_none(device):
    model, x = make(device), torch.randn(40, DIM, device=device)
    with torch.no_grad():
        model(x)
    assert moxie.participation(model).backward == []
    model.requires_grad_(False)
    model.experts.w2.requires_grad_()
    model(x).sum().backward()
    assert moxie.participation(model).backward == ["experts.w2"]


def test_checkpointing_repeats_a_forward_within_the_step(device):
    model, x = make(device), torch.randn(40, DIM, device=device, requires_grad=True)
    checkpoint(model.__call__, x, "a", use_reentrant=False).sum().backward()
    part = moxie.participation(model)
    assert part.forward == part.backward == ["a", *EXPERT_NAMES]


def test_a_copy_has_a_record_of_its_own(device):
    model, x = make(device), torch.randn(40, DIM, device=device)
    other = copy.deepcopy(model)
    other(x)
    assert moxie.participation(other).missing == ["b"] and len(moxie.participation(model).missing) == 5


@pytest.mark.parametrize("whole", (True, False))
def test_graphs_record_the_last_step_too(whole, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(moxie.steps, "_hidden", [False])
    model, x = make("cpu"), torch.randn(40, DIM)
    if whole:
        call = torch.compile(model, fullgraph=True, backend="aot_eager")
    else:
        call = model
        model.experts.compile(fullgraph=True, backend="aot_eager")
    for way, missing in (("a", ["b"]), ("b", ["a"]), ("a", ["b"]), ("a", ["b"])):
        call(x, way).sum().backward()
        part = moxie.participation(call)
        assert part.missing == missing and part.backward == part.forward and part.unknown == []


def test_a_checkpointed_part_of_a_graph_is_called_unknown(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(moxie.steps, "_hidden", [False])
    model, x = make("cpu"), torch.randn(40, DIM, requires_grad=True)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(x):
        return checkpoint(model.experts, model.a(x), OFFS, use_reentrant=False)

    call(x).sum().backward()
    part = moxie.participation(model)
    assert part.forward == ["a"] and set(part.unknown) == {"b", *EXPERT_NAMES} and part.missing == []
    assert "unknown" in str(part)


def test_a_report_is_right_under_compile():
    torch._dynamo.reset()
    model = Branches()
    report = moxie.quantize_(model, "mxfp8_rceil")
    torch.compile(model, fullgraph=True, backend="aot_eager")(torch.randn(40, DIM), "a")
    assert report.unused == ["b"]


def test_grouped_experts_take_part(device):
    model = nn.ModuleList([moxie.nn.GroupedExperts(64, 96, 2, device=device)])
    moxie.quantize_(model, "mxfp8_floor")
    assert moxie.participation(model).missing == ["0"]
    offs = torch.tensor([2, 5], dtype=torch.int32, device=device)
    model[0](torch.randn(5, 64, device=device), offs).sum().backward()
    assert moxie.participation(model).backward == ["0"]
    moxie.unquantize_(model)
    assert moxie.participation(model).parts == [] and not model[0]._forward_hooks


# ---- what adapters do ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "add",
    (
        lambda w, d: w + d,
        lambda w, d: d + w,
        lambda w, d: w - d,
        lambda w, d: torch.add(w, d, alpha=1),
        lambda w, d: torch.add(input=w, other=d),
        lambda w, d: w.add(d),
        lambda w, d: torch.baddbmm(w, d, torch.eye(DIM, device=w.device).expand(EXPERTS, -1, -1)),
    ),
)
@pytest.mark.parametrize("compiled", (False, True))
def test_the_sum_of_a_weight_and_an_adapters_delta_is_quantized(add, compiled, device):
    torch._dynamo.reset()
    experts = TitanExperts().to(device)
    moxie.quantize_(experts, "mxfp8_rceil")
    w, x = experts.w1, torch.randn(40, DIM, device=device)
    delta = torch.randn(w.shape, device=device, requires_grad=True)
    offs = OFFS.to(device)
    call = lambda x, delta: torch._grouped_mm(x, add(experts.w1, delta).transpose(-2, -1), offs=offs)
    y = (torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call)(x, delta)
    assert torch.equal(y, moxie.grouped_mm(x, add(w.detach(), delta), offs, recipe="mxfp8_rceil"))
    y.sum().backward()
    assert delta.grad.any() and moxie.participation(experts).backward == ["w1"]


def test_activations_to_which_a_parameter_is_added_stay_activations(device):
    """x + w has the shape of w but is an activation: it must not count as a weight, and its product with another weight must be
    quantized."""
    model = TitanExperts().to(device)
    moxie.quantize_(model, "mxfp8_rceil")
    x = torch.randn(EXPERTS, 48, DIM, device=device) + model.w1
    y = torch.bmm(x, model.w3.mT)
    assert torch.equal(y, moxie.grouped_mm(
        x.detach().flatten(0, 1), model.w3.detach(), 48 * torch.arange(1, EXPERTS + 1, dtype=torch.int32, device=device),
        recipe="mxfp8_rceil",
    ).view_as(y))  # fmt: skip


# ---- what is left alone -------------------------------------------------------------------------------------------------------


def test_3d_parameters_that_are_no_experts_are_left_alone():
    class Vision(nn.Module):
        def __init__(self):
            super().__init__()
            self.position, self.cls_token = nn.Parameter(torch.zeros(1, 64, DIM)), nn.Parameter(torch.zeros(1, 1, DIM))
            self.kernel, self.experts = nn.Parameter(torch.zeros(64, 64, 4)), TitanExperts()

    report = moxie.quantize_(Vision(), "mxfp8_rceil")
    assert report.converted == EXPERT_NAMES
    assert "no stack of experts" in report.left_alone["position"]
    assert "a side is smaller than 32" in report.left_alone["kernel"]


def test_linears_narrower_than_a_block_are_left_alone():
    model = nn.ModuleDict({"dt_proj": nn.Linear(2, 64), "in_proj_ba": nn.Linear(128, 4), "up": nn.Linear(64, 64)})
    report = moxie.quantize_(model, "mxfp8_rceil")
    assert report.converted == ["up"] and report.left_alone["dt_proj"] == "a side is smaller than 32"
    assert moxie.quantize_(model, "mxfp8_rceil", skip=()).converted == ["dt_proj", "in_proj_ba", "up"]


def test_experts_that_are_linears_are_told_of_where_a_config_for_experts_finds_nothing():
    model = nn.ModuleDict({"moe": nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(64, 64)])})})
    with pytest.raises(ValueError, match=r"its experts are linears, such as moe.experts.0, and FqnToConfig"):
        moxie.quantize_(model, moxie.MXFP8GroupedMMConfig())
    keys = moxie.FqnToConfig({r"re:.*\.experts\..*": moxie.MXFP8GroupedMMConfig()})
    assert moxie.quantize_(model, keys).converted == ["moe.experts.0"]


def test_names_of_older_models_get_a_suggestion():
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": TitanExperts()})})
    for key in ("block_sparse_moe.experts.0.w1", "re:.*block_sparse_moe.*"):
        with pytest.raises(ValueError, match=r"did you mean mlp\.experts"):
            moxie.quantize_(model, moxie.FqnToConfig({key: "mxfp8_rceil"}))


def test_a_copy_of_the_weights_for_every_row_names_the_parameter_and_the_way_out():
    experts = TitanExperts()
    moxie.quantize_(experts, "mxfp8_rceil")
    ids = torch.zeros(1025, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"w1: a product must be of 1 to 1024 matrices, got 1025: .*set_experts_implementation"):
        torch.bmm(experts.w1[ids], torch.randn(1025, DIM, 1))
