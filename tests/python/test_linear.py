"""MXLinear: nn.Linear with quantized products."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

import moxie
from grouped_reference import Problem, run

RECIPES = moxie.recipe_names()


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_the_grouped_product_with_one_group(recipe, dtype, bias, device):
    linear = moxie.MXLinear(96, 40, bias, device=device, dtype=dtype, config=recipe)
    x = torch.randn(3, 5, 96, device=device, dtype=dtype, requires_grad=True)
    dy = torch.randn(3, 5, 40, device=device, dtype=dtype)
    y = linear(x)
    y.backward(dy)
    problem = Problem(
        x.detach().view(15, 96), linear.weight.detach()[None], dy.view(15, 40), None, linear.bias.detach() if bias else None
    )
    expected = run(problem, recipe)
    assert torch.equal(y, expected.y.view(3, 5, 40)) and torch.equal(x.grad, expected.dx.view_as(x))
    assert torch.equal(linear.weight.grad, expected.dw[0])
    if bias:
        assert torch.equal(linear.bias.grad, expected.dbias)


@pytest.mark.parametrize("shape", ((96,), (1, 96), (2, 3, 4, 96), (0, 96), (3, 0, 96)), ids=str)
def test_any_leading_dims(shape, device):
    linear, plain = moxie.MXLinear(96, 40, device=device), nn.Linear(96, 40, device=device)
    x = torch.randn(shape, device=device, requires_grad=True)
    y = linear(x)
    assert y.shape == plain(x).shape
    y.sum().backward()
    assert x.grad.shape == x.shape


def test_a_transposed_input_is_taken_as_it_is(device):
    linear = moxie.MXLinear(96, 40, device=device)
    x = torch.randn(4, 96, 7, device=device).transpose(1, 2)
    assert torch.equal(linear(x), linear(x.contiguous()))


def test_from_float_keeps_the_module_and_to_float_gives_it_back():
    linear = nn.Linear(64, 32)
    weight, seen = linear.weight, []
    linear.register_forward_hook(lambda *_: seen.append(1))
    state = copy.deepcopy(linear.state_dict())
    converted = moxie.MXLinear.from_float(linear, "mxfp8_rceil")
    assert converted is linear and linear.weight is weight and "recipe=mxfp8_rceil" in repr(linear)
    linear(torch.randn(2, 64))
    assert seen and linear.state_dict().keys() == state.keys()
    assert type(linear.to_float()) is nn.Linear
    assert torch.equal(nn.functional.linear(torch.ones(2, 64), weight, linear.bias), linear(torch.ones(2, 64)))
    assert set(linear.__dict__) == set(nn.Linear(64, 32).__dict__)


def test_a_parametrized_linear_comes_back_parametrized():
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32))
    moxie.quantize_(model, "mxfp8_rceil")
    for linear in model:
        nn.utils.parametrizations.weight_norm(linear)
    expected = copy.deepcopy(model)
    moxie.unquantize_(model)
    x = torch.randn(5, 64)
    for linear, other in zip(model, expected):
        assert isinstance(linear, nn.Linear) and not isinstance(linear, moxie.MXLinear) and isinstance(other, moxie.MXLinear)
    h = nn.functional.linear(x, model[0].weight, model[0].bias)
    assert torch.equal(model(x), nn.functional.linear(h, model[1].weight, model[1].bias))
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is nn.Linear


class Named(nn.Linear):
    """A subclass that keeps nn.Linear's forward, as frameworks define them to add methods."""

    def twice(self, x):
        return self(x) * 2


class Squared(nn.Linear):
    def forward(self, x):
        return super().forward(x) ** 2


def test_a_subclass_without_a_forward_of_its_own_stays_one(device):
    x = torch.randn(3, 64, device=device)
    linear = Named(64, 32, device=device)
    plain = moxie.MXLinear(64, 32, config="mxfp8_rceil", device=device)
    plain.load_state_dict(linear.state_dict())
    moxie.MXLinear.from_float(linear, "mxfp8_rceil", name="up")
    assert isinstance(linear, moxie.MXLinear) and isinstance(linear, Named) and linear.conversion.name == "up"
    for one in (linear, copy.deepcopy(linear), pickle.loads(pickle.dumps(linear))):
        assert type(one) is type(linear) and torch.equal(one.twice(x), plain(x) * 2)
    moxie.MXLinear.from_float(linear, "mxfp8_rceil_128")
    assert type(linear.to_float()) is Named and torch.equal(linear(x), F.linear(x, linear.weight, linear.bias))


def test_a_subclass_with_a_forward_of_its_own_is_left_alone():
    model = nn.ModuleDict({"squared": Squared(64, 64), "named": Named(64, 64)})
    report = moxie.quantize_(model, "mxfp8_rceil")
    assert report.converted == ["named"] and report.left_alone == {"squared": "Squared has a forward of its own"}
    with pytest.raises(
        TypeError, match="from_float: linear must be an nn.Linear with its forward, Squared has a forward of its own"
    ):
        moxie.MXLinear.from_float(Squared(64, 64), "mxfp8_rceil")
    assert type(moxie.unquantize_(model)["named"]) is Named


def test_a_linear_that_was_parametrized_before_comes_back_parametrized():
    linear = weight_norm(nn.Linear(64, 64))
    x, before = torch.randn(3, 64), type(linear)
    moxie.MXLinear.from_float(linear, "mxfp8_rceil")
    assert torch.equal(linear(x), moxie.grouped_mm(x, linear.weight.unsqueeze(0), recipe="mxfp8_rceil", bias=linear.bias))
    assert type(linear.to_float()) is before and torch.equal(linear(x), F.linear(x, linear.weight, linear.bias))


def test_autocast_gives_its_dtype(device):
    linear = moxie.MXLinear(64, 32, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = linear(torch.randn(4, 64, device=device))
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert linear.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("cached", (False, True))
def test_it_compiles_without_breaks(cached, device):
    torch._dynamo.reset()
    linear = moxie.MXLinear(64, 32, device=device, config=moxie.MXLinearConfig(weight_cache=cached))
    x = torch.randn(3, 5, 64, device=device)
    assert torch.equal(torch.compile(linear, fullgraph=True, backend="aot_eager")(x), linear(x))


def test_a_cache_of_a_parameter_that_is_gone_is_not_used(device):
    linear = moxie.MXLinear(64, 32, device=device, config=moxie.MXLinearConfig(weight_cache=True))
    linear.weight = nn.Parameter(torch.randn(32, 64, device=device))
    x = torch.randn(4, 64, device=device)
    with pytest.warns(UserWarning, match="another parameter has taken the place of the cached one"):
        y = linear(x)
    assert torch.equal(y, moxie.MXLinear.from_float(linear, "mxfp8_rceil")(x))
    copied = copy.deepcopy(moxie.MXLinear.from_float(linear, moxie.MXLinearConfig(weight_cache=True)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(copied(x), y)


def test_a_cached_linear_learns_as_one_that_is_not(device):
    losses = []
    for cached in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
        moxie.quantize_(model, moxie.MXLinearConfig(weight_cache=cached))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if cached:
            moxie.refresh_after(model, optimizer)
        x, target = torch.randn(32, 64, device=device), torch.randint(8, (32,), device=device)
        for _ in range(5):
            loss = nn.functional.cross_entropy(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == losses[1] < 2
