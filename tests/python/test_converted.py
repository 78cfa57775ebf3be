"""Converted parameters multiply through Moxie in every way that models write products, and shared parameters stay shared."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moxie
from moe_models import DIM, EXPERTS, HIDDEN, HuggingExperts, TitanExperts, normal
from moxie.converted import is_converted

X, OFFS = torch.randn(40, DIM), torch.tensor([7, 7, 30, 40], dtype=torch.int32)


def converted(config="mxfp8_rceil") -> TitanExperts:
    experts = TitanExperts()
    moxie.quantize_(experts, config)
    return experts


@pytest.mark.parametrize(
    "view",
    (
        lambda w: w.mT,
        lambda w: w.mH,
        lambda w: w.adjoint(),
        lambda w: w.transpose(1, 2),
        lambda w: torch.transpose(w, -1, -2),
        lambda w: w.transpose(dim0=1, dim1=2),
        lambda w: w.permute(0, 2, 1),
        lambda w: w.permute(dims=(0, 2, 1)),
        lambda w: w.swapaxes(-1, -2),
        lambda w: w.movedim(1, 2),
        lambda w: w[:].mT,
        lambda w: w[...].mT,
        lambda w: w.clone().mT,
        lambda w: w.mT.contiguous(),
        lambda w: w.view(EXPERTS, HIDDEN, DIM).mT,
        lambda w: w.view_as(w).mT,
        lambda w: w.to(X).mT,
        lambda w: w.to(dtype=torch.float32).mT,
        lambda w: w.type(torch.float32).mT,
        lambda w: w.type_as(X).mT,
        lambda w: w.bfloat16().float().mT,
        lambda w: w[torch.arange(EXPERTS)].mT,
        lambda w: w.expand(-1, -1, -1).mT,
        lambda w: w.flatten(0, 1).unflatten(0, (EXPERTS, HIDDEN)).mT,
    ),
)
def test_views_and_copies_keep_the_conversion(view):
    w = converted().w1
    w._moxie.used = False
    y = torch._grouped_mm(X, view(w), offs=OFFS)
    assert w._moxie.used and torch.equal(y, moxie.grouped_mm(X, view(w.detach()).mT, OFFS, recipe="mxfp8_rceil"))
    y.sum().backward()
    assert type(w.grad) is torch.Tensor and w.grad.any()


class Looped(nn.Module):
    """Experts with weights [E, in, out] and biases, applied in three ways: in a loop over experts, unrolled, or all experts to
    all tokens."""

    def __init__(self):
        super().__init__()
        self.up, self.down = normal(EXPERTS, DIM, HIDDEN), normal(EXPERTS, HIDDEN, DIM)
        self.up_bias, self.down_bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN)), nn.Parameter(torch.randn(EXPERTS, DIM))

    def one_by_one(self, x, ids):
        out = torch.zeros_like(x)
        for expert in torch.arange(EXPERTS):
            rows = torch.where(ids == expert)[0]
            h = F.silu(x[rows] @ self.up[expert] + self.up_bias[expert])
            out = out.index_add(0, rows, h @ self.down[expert] + self.down_bias[expert])
        return out

    def unrolled(self, x, ids):
        parts = [
            F.silu(x @ up + up_bias) @ down + down_bias
            for up, up_bias, down, down_bias in zip(self.up, self.up_bias, self.down, self.down_bias)
        ]
        return torch.stack(parts)[ids, torch.arange(len(x))]

    def batched(self, x, ids):
        h = F.silu(torch.bmm(x.expand(EXPERTS, -1, -1), self.up) + self.up_bias[:, None])
        return (torch.bmm(h, self.down) + self.down_bias[:, None])[ids, torch.arange(len(x))]


def test_loops_over_experts_and_batches_give_the_same():
    module = Looped()
    report = moxie.quantize_(module, "mxfp8_rceil")
    assert report.converted == ["up", "down"]
    ids, results = torch.randint(EXPERTS, (40,)), []
    for forward in (module.one_by_one, module.unrolled, module.batched):
        for parameter in (module.up, module.down):
            parameter._moxie.used = False
        results.append(forward(X, ids))
        assert report.unused == []
        results[-1].sum().backward()
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])
    plain = moxie.unquantize_(module).batched(X, ids)
    assert (results[2] - plain).norm() > 1e-3 * plain.norm()  # it was quantized


def test_an_expert_may_have_no_rows():
    w = converted().w1
    for y in (F.linear(X[:0], w[0]), X[:0] @ w[0].t(), X[:0] @ w.mT, torch.bmm(X[:0].expand(EXPERTS, 0, DIM), w.mT)):
        assert y.shape[-2:] == (0, HIDDEN)
        y.sum().backward()
    assert not w.grad.any()


def test_a_result_that_is_given_is_written_by_torch():
    w = converted().w1
    plain = w.detach()
    with torch.no_grad():
        for function in (
            lambda w, out: torch.mm(X, w[0].t(), out=out),
            lambda w, out: torch.matmul(X, w[0].t(), out=out),
            lambda w, out: torch.addmm(torch.ones(HIDDEN), X, w[0].t(), out=out),
        ):
            out, expected = torch.empty(40, HIDDEN), torch.empty(40, HIDDEN)
            assert function(w, out) is out
            function(plain, expected)
            assert torch.equal(out, expected)


def test_what_torch_refuses_is_refused():
    w = converted().w1
    for function in (
        lambda w: torch.mm(X[None], w[0].t()),
        lambda w: torch.mm(X, w.mT),
        lambda w: torch.bmm(X, w.mT),
        lambda w: torch.bmm(X[None], w.mT),
        lambda w: torch.bmm(X, w[0].t()),
        lambda w: torch.addmm(torch.ones(HIDDEN), X[None], w[0].t()),
        lambda w: torch.addmm(torch.ones(2, 40, HIDDEN), X, w[0].t()),
    ):
        with pytest.raises(RuntimeError) as expected:
            function(w.detach())
        with pytest.raises(RuntimeError) as error:
            function(w)
        assert str(error.value) == str(expected.value)


def test_a_product_of_two_weights_is_torchs_own():
    experts = converted()
    w1, w2 = experts.w1, experts.w2
    for function in (
        lambda a, b: a @ a.mT,
        lambda a, b: torch.bmm(a, b),
        lambda a, b: b[0] @ a[0],
        lambda a, b: F.linear(a[0], a[1]),
        lambda a, b: torch.addmm(torch.ones(DIM), b[0], a[1]),
    ):
        y = function(w1, w2)
        assert torch.equal(y, function(w1.detach(), w2.detach()))
        y.sum().backward()


def test_an_operator_says_what_is_wrong():
    """If `@` raises a TypeError, torch replaces it by its own "operator not defined". Moxie's message must survive."""
    with pytest.raises(RuntimeError, match="x must be torch.bfloat16 or torch.float32, got torch.float16"):
        X.half() @ converted().w1[0].t()


def test_addmm_does_not_read_what_it_multiplies_by_zero():
    w = converted().w1
    y = torch.addmm(torch.full((40, HIDDEN), torch.nan), X, w[0].t(), beta=0, alpha=2)
    assert torch.equal(y, 2 * (X @ w[0].t()))


def test_an_element_is_a_number():
    w = converted().w1
    assert type(w[0, 0, 0]) is torch.Tensor and f"{w[0, 0, 0]:.3f}" == f"{w[0, 0, 0].item():.3f}"


class Held(nn.Module):
    """Parameters in torch's own containers."""

    def __init__(self):
        super().__init__()
        self.several = nn.ParameterList([normal(EXPERTS, HIDDEN, DIM) for _ in range(2)])
        self.named = nn.ParameterDict({"up": normal(EXPERTS, HIDDEN, DIM)})

    def forward(self, x, offs):
        return sum(torch._grouped_mm(x, w.mT, offs=offs) for w in (*self.several, self.named["up"]))


def test_containers_of_parameters_are_converted_and_print():
    model = Held()
    report = moxie.quantize_(model, moxie.MXFP8GroupedMMConfig(weight_cache=True))
    assert report.converted == ["several.0", "several.1", "named.up"]
    model(X, OFFS)
    assert report.unused == [] and "Parameter containing" in repr(model)
    moxie.unquantize_(model)
    assert len(model.several) == 2 and list(model.named) == ["up"]


def test_parameters_and_copies_are_saved_as_plain_ones():
    experts = converted()
    experts.w1.no_decay = True
    average = {name: parameter.clone() for name, parameter in experts.named_parameters()}
    for saved, kind in (
        (dict(experts.named_parameters()), nn.Parameter),
        (average, torch.Tensor),
        (experts.state_dict(keep_vars=True), nn.Parameter),
        ({"w1": experts.w1[0]}, torch.Tensor),
    ):
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert all(type(value) is kind and torch.equal(value, saved[name]) for name, value in loaded.items())
    twin = pickle.loads(pickle.dumps(experts))  # a parameter that is pickled with its module comes back converted
    assert is_converted(twin.w1) and twin.w1.no_decay and twin.w1._moxie is twin._moxie_converted["w1"]
    assert torch.equal(twin(X, OFFS), experts(X, OFFS))


def pickle_with_old_names(module: nn.Module) -> bytes:
    """Pickles a module as an older version did, when moxie.convert_parameter was called moxie.experts, and `transposed` was
    `turned`."""
    # Protocol 0 writes names without their length, so they can be replaced by names of another length.
    text = pickle.dumps(module, protocol=0)
    for new, old in (
        (b"cmoxie.convert_parameter\ntransposed\n", b"cmoxie.experts\nturned\n"),
        (b"cmoxie.convert_parameter\n", b"cmoxie.experts\n"),
        (b"Vcache_is_transposed\n", b"Vcache_is_turned\n"),
    ):
        assert new in text
        text = text.replace(new, old)
    return text


def test_a_module_that_was_pickled_with_old_names_loads():
    model = nn.ModuleDict({"experts": HuggingExperts().bfloat16(), "linear": nn.Linear(DIM, DIM)})
    grouped, linear = moxie.MXFP8GroupedMMConfig(weight_cache="kn"), moxie.MXLinearConfig(weight_cache=True)
    moxie.quantize_(model, moxie.FqnToConfig({"re:experts.*proj": grouped, "linear": linear}))
    twin = pickle.loads(pickle_with_old_names(model))
    experts, x = twin["experts"], X.bfloat16()
    assert is_converted(experts.down_proj) and experts.down_proj._moxie is experts._moxie_converted["down_proj"]
    assert torch.equal(experts(x, OFFS), model["experts"](x, OFFS)) and torch.equal(twin["linear"](X), model["linear"](X))
    experts.down_proj_cache.qdata.zero_()
    assert torch.equal(experts(x, OFFS)[:7], experts.down_proj_bias[0].expand(7, -1))  # the cache is used
    moxie.unquantize_(twin)
    # unquantize_ has recognized the unpickled hooks as Moxie's and removed them.
    assert type(experts.down_proj) is nn.Parameter and not experts._forward_pre_hooks


def test_a_parameter_that_is_removed_is_forgotten():
    experts = converted()
    experts.w3 = None
    del experts.w2
    experts.load_state_dict(experts.state_dict())
    moxie.unquantize_(experts)
    assert type(experts.w1) is nn.Parameter and not hasattr(experts, "_moxie_converted")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = TitanExperts(), TitanExperts()
        self.b.w1 = self.a.w1

    def forward(self, x, offs):
        return self.a(x, offs) + self.b(x, offs)


@pytest.mark.parametrize("weight_cache", (False, True))
def test_a_parameter_with_two_names_is_converted_once(weight_cache):
    model = Tied()
    report = moxie.quantize_(model, moxie.MXFP8GroupedMMConfig(weight_cache=weight_cache))
    assert {"a.w1", "b.w1"} < set(report.converted) and "61440 of 61952" in str(report)  # each element once
    model(X, OFFS)
    assert report.unused == [] and model.a.w1 is model.b.w1
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.a.w1 is twin.b.w1 and is_converted(twin.a.w1)
    moxie.quantize_(model, "mxfp8_floor")
    assert "floor" in model.b.w1._moxie.recipe and model.b._moxie_converted["w1"] is model.a._moxie_converted["w1"]
    moxie.unquantize_(model)
    assert not any(module._forward_pre_hooks or hasattr(module, "_moxie_converted") for module in model.modules())
    assert type(model.a.w1) is nn.Parameter and [name for name, _ in model.named_modules()] == ["", "a", "b"]


@pytest.mark.parametrize(
    "convert",
    (
        lambda model: moxie.quantize_(model, moxie.FqnToConfig({"a.w1": "mxfp8_rceil", "b.w1": "mxfp8_floor"})),
        lambda model: moxie.quantize_(model, moxie.FqnToConfig({"b": "mxfp8_rceil"})),
        lambda model: moxie.quantize_(model, "mxfp8_rceil", lambda module, name: name == "a"),
    ),
)
def test_a_parameter_with_two_names_is_not_converted_in_two_ways(convert):
    model = Tied()
    with pytest.raises(ValueError, match="a.w1 and b.w1 are one parameter, which cannot be converted in two ways"):
        convert(model)
    assert not any(is_converted(parameter) for parameter in model.parameters())


def test_a_model_is_data_parallel(tmp_path):
    distributed = pytest.importorskip("torch.distributed")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        experts = converted()
        nn.parallel.DistributedDataParallel(experts)(X, OFFS).sum().backward()
        torch.manual_seed(0)
        expected = converted()
        expected(X, OFFS).sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(experts.parameters(), expected.parameters()))
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_forward_may_be_checkpointed(use_reentrant):
    experts, x = converted(), X.clone().requires_grad_()
    torch.utils.checkpoint.checkpoint(experts, x, OFFS, use_reentrant=use_reentrant).sum().backward()
    grads = [parameter.grad.clone() for parameter in experts.parameters()]
    experts.zero_grad()
    experts(X, OFFS).sum().backward()
    assert all(torch.equal(a, parameter.grad) for a, parameter in zip(grads, experts.parameters()))
