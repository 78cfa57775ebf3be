"""Weight caches of converted models: when products use them, when there is a warning, and how they move and save with the
model."""

import copy
import io
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moxie
from moe_models import DIM, EXPERTS, HuggingExperts, LanguageModel, TitanExperts, batch, make, train
from moxie.converted import ConvertedParameter

OFFS = torch.tensor([7, 7, 30, 40], dtype=torch.int32)
CACHED = moxie.FqnToConfig(
    {
        "re:.*experts.*": moxie.MXFP8GroupedMMConfig(weight_cache="kn"),
        "re:.*shared_expert.*": moxie.MXLinearConfig(weight_cache=True),
    }
)
PLAIN = moxie.FqnToConfig({"re:.*experts.*": moxie.MXFP8GroupedMMConfig(), "re:.*shared_expert.*": moxie.MXLinearConfig()})


def rows(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(40, DIM, dtype=dtype)


def converted(config, seed: int = 0) -> LanguageModel:
    model = make(HuggingExperts, seed=seed)
    moxie.quantize_(model, config)
    return model


@pytest.fixture
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # torch itself raises these warnings while it is imported.
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        yield


@pytest.mark.parametrize(
    "layer",
    (
        lambda: moxie.MXLinear(DIM, 32, config=moxie.MXLinearConfig(weight_cache=True)),
        lambda: moxie.nn.GroupedExperts(DIM, 32, EXPERTS, recipe="mxfp8_rceil", weight_cache=True),
    ),
)
def test_a_cache_that_was_not_refreshed_is_warned_of(layer):
    layer, x = layer(), rows()
    args = (x,) if isinstance(layer, nn.Linear) else (x, OFFS)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer(*args).sum().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="the weights have changed since their cache was filled"):
        layer(*args)
    moxie.refresh_(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(*args)


def test_a_cache_that_was_refreshed_is_not_warned_of(no_warnings):
    model = converted(CACHED)
    optimizer = torch.optim.AdamW(model.parameters())
    moxie.refresh_after(model, optimizer)
    train(model, 3, optimizer)
    for change in (copy.deepcopy, nn.Module.float, nn.Module.bfloat16, lambda model: pickle.loads(pickle.dumps(model))):
        change(model)(batch())
    for assign in (False, True):
        model.load_state_dict(make(HuggingExperts, seed=2).state_dict(), assign=assign)
        model(batch())


def test_a_cast_that_changes_nothing_keeps_the_cache(no_warnings):
    """w.bfloat16() changes nothing if w is bf16 already, so the product must still use w's cache. Models with f32 weights write
    it this way."""
    torch._dynamo.reset()
    experts = TitanExperts().bfloat16()
    moxie.quantize_(experts, moxie.MXFP8GroupedMMConfig(weight_cache=True))
    x = rows(torch.bfloat16)
    for cache in (experts.w1_cache, experts.w2_cache, experts.w3_cache):
        cache.qdata.zero_()
    for function in (experts, torch.compile(experts, fullgraph=True, backend="aot_eager")):
        assert torch.equal(function(x, OFFS)[:7], experts.bias[0].expand(7, -1))  # the cache holds zeros


@pytest.mark.parametrize(
    "product",
    (
        lambda x, w: F.linear(x, w[0]),
        lambda x, w: torch._grouped_mm(x, w.bfloat16().mT, offs=OFFS),
        lambda x, w: torch._grouped_mm(x, w.clone().mT, offs=OFFS),
    ),
)
def test_a_part_or_a_copy_has_no_cache_and_that_is_warned_of(product):
    experts = TitanExperts()
    moxie.quantize_(experts, moxie.MXFP8GroupedMMConfig(weight_cache=True))
    with pytest.warns(UserWarning, match="w1: the weight cache is of the whole parameter, and the model multiplies by a part"):
        product(rows(), experts.w1)


@pytest.mark.filterwarnings("ignore:w1. the weight cache")
def test_a_copy_that_is_written_to_is_multiplied_as_it_is():
    experts, x = TitanExperts(), rows()
    moxie.quantize_(experts, moxie.MXFP8GroupedMMConfig(weight_cache=True))
    twice = experts.w1.clone().detach().mul_(2)
    assert torch.equal(torch._grouped_mm(x, twice.mT, offs=OFFS), 2 * torch._grouped_mm(x, experts.w1.mT, offs=OFFS))


@pytest.mark.parametrize("weights_come", ("loaded", "assigned", "written"))
def test_caches_of_the_meta_device_are_filled_when_weights_come(weights_come, no_warnings):
    with torch.device("meta"):
        model = LanguageModel(HuggingExperts)
    moxie.quantize_(model, CACHED)
    stock = make(HuggingExperts)
    if weights_come != "assigned":
        model.to_empty(device="cpu")
    if weights_come == "written":
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), stock.parameters()):
                parameter.copy_(value)
        moxie.refresh_(model)
    else:
        model.load_state_dict(stock.state_dict(), assign=weights_come == "assigned")
    assert torch.equal(model(batch()), converted(PLAIN)(batch()))
    experts = model.layers[0].moe.experts
    assert type(experts.down_proj) is ConvertedParameter
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moxie.refresh_after(model, optimizer)
    train(model, 2, optimizer)
    experts.down_proj_cache.qdata.zero_()
    assert torch.equal(experts(rows(torch.bfloat16), OFFS)[:7], experts.down_proj_bias[0].expand(7, -1))  # it is used


@pytest.mark.parametrize("copied", ("deepcopy", "pickle", "torch.save"))
def test_a_copied_model_has_caches_of_its_own(copied, no_warnings):
    model = converted(CACHED)
    expected = model(batch())
    if copied == "torch.save":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    else:
        twin = copy.deepcopy(model) if copied == "deepcopy" else pickle.loads(pickle.dumps(model))
    experts = twin.layers[0].moe.experts
    assert torch.equal(twin(batch()), expected) and experts.down_proj._moxie.cache is experts.down_proj_cache
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    moxie.refresh_after(twin, optimizer)
    plain = converted(PLAIN)
    assert train(twin, 2, optimizer) == train(plain, 2, torch.optim.SGD(plain.parameters(), lr=0.1))
    assert torch.equal(model(batch()), expected)
