"""quantize_ converts a stock model in one call; the model then trains, saves, loads, and can be converted back."""

import copy
import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moxie
from grouped_reference import sqnr
from moe_models import DIM, EXPERTS, HIDDEN, HuggingExperts, LanguageModel, TitanExperts, batch, loss_of, make, train
from moxie.converted import ConvertedParameter, is_converted

GROUPED = moxie.MXFP8GroupedMMConfig.from_recipe(moxie.MXFP8GroupedMMRecipe.MXFP8_RCEIL)
LINEAR = moxie.MXLinearConfig.from_recipe_name(moxie.MXLinearRecipeName.MXFP8_CUBLAS_RCEIL)
TITAN = [f"layers.0.moe.experts.{name}" for name in ("w1", "w3", "w2")]
LINEARS = ["layers.0.attention.wq", "layers.0.attention.wo", "layers.0.moe.shared_expert.up", "layers.0.moe.shared_expert.down"]

MODES = {  # name -> (arguments of quantize_, what must be converted)
    "experts": (GROUPED, TITAN),
    "linears": (LINEAR, LINEARS),
    "both": ("mxfp8_rceil_128", LINEARS[:2] + TITAN + LINEARS[2:]),
    "one_parameter": (moxie.FqnToConfig({"layers.0.moe.experts.w1": GROUPED}), TITAN[:1]),
    "a_recipe_per_parameter": (
        moxie.FqnToConfig(
            {
                "layers.0.moe.experts.w1": moxie.MXFP8GroupedMMConfig.from_recipe("mxfp8_rceil_wgrad_with_hp"),
                "layers.0.moe.experts.w2": moxie.FP8GroupedMMConfig(),
                "re:.*experts.*": moxie.MXFP8GroupedMMConfig.from_recipe("mxfp8_rceil_32x32"),
                "re:.*shared_expert.*": LINEAR,
                "re:.*attention\\.w[qo]": "mxfp8_floor",
            }
        ),
        LINEARS[:2] + TITAN + LINEARS[2:],
    ),
}


def assert_state_is_plain_and_equal(actual: dict, expected: dict) -> None:
    assert list(actual) == list(expected)
    for key, value in actual.items():
        assert type(value) is torch.Tensor and torch.equal(value, expected[key]), key


def saved_and_loaded(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# ---- modes ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_stock_model_converts_trains_saves_and_loads(mode):
    config, expected = MODES[mode]
    model, stock = make(), make()
    before, parameters = copy.deepcopy(model.state_dict()), list(model.parameters())
    report = moxie.quantize_(model, config)
    assert sorted(report.converted) == sorted(expected)
    assert all(a is b for a, b in zip(parameters, model.parameters()))  # in place
    assert_state_is_plain_and_equal(model.state_dict(), before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses, reference = train(model, 50), train(stock, 50)
    assert report.unused == []
    assert losses[-1] < 0.5 * losses[0] and abs(losses[-1] - reference[-1]) < 0.35 * reference[0]
    state = saved_and_loaded(model.state_dict())
    plain = make(seed=1)
    plain.load_state_dict(state)  # the saved state loads into a model that is not converted
    again = make(seed=2)
    moxie.quantize_(again, config)
    again.load_state_dict(plain.state_dict())  # the plain state loads into a converted model
    with torch.no_grad():
        assert torch.equal(again(batch()), model(batch()))
        assert not torch.equal(plain(batch()), model(batch()))  # the converted model does quantize
    moxie.unquantize_(model)
    with torch.no_grad():
        assert torch.equal(plain(batch()), model(batch()))
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters()) and not model._forward_hooks
    for module, other in zip(model.modules(), plain.modules()):
        assert set(vars(module)) == set(vars(other)) and not module._forward_pre_hooks and not module._load_state_dict_post_hooks


@pytest.mark.parametrize("mode", MODES)
def test_compiled_and_eager_agree(mode):
    torch._dynamo.reset()
    model = make()
    moxie.quantize_(model, MODES[mode][0])
    results = []
    for backend in (None, "aot_eager"):
        model.zero_grad()
        function = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)
        loss = loss_of(function, batch())
        loss.backward()
        results.append((loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
    (loss, grads), (compiled_loss, compiled_grads) = results
    assert torch.equal(loss, compiled_loss)
    for name in grads:
        assert sqnr(compiled_grads[name], grads[name]) > 40, name


def test_inductor_agrees_with_eager_and_really_quantizes():
    torch._dynamo.reset()
    experts = TitanExperts().bfloat16()
    moxie.quantize_(experts, "mxfp8_rceil")
    x, offs = torch.randn(40, DIM, dtype=torch.bfloat16), torch.tensor([7, 7, 30, 40], dtype=torch.int32)
    y = torch.compile(experts, fullgraph=True)(x, offs)
    expected = experts(x, offs)
    plain = moxie.unquantize_(experts)(x, offs)
    assert sqnr(y, expected) > sqnr(y, plain) + 10 and sqnr(y, plain) < 40


@pytest.mark.parametrize("compiled", (False, True))
@pytest.mark.parametrize("experts", (TitanExperts, HuggingExperts))
def test_both_layouts_of_experts_run_through_moxie(experts, compiled):
    """Each product of the converted module equals grouped_mm's, bit for bit."""
    torch._dynamo.reset()
    module = experts().bfloat16()
    report = moxie.quantize_(module, GROUPED)
    assert len(report.converted) == (3 if experts is TitanExperts else 2)
    x, offs = torch.randn(50, DIM, dtype=torch.bfloat16), torch.tensor([7, 7, 30, 50], dtype=torch.int32)
    y = (torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module)(x, offs)
    product = lambda x, w: moxie.grouped_mm(x, w.detach(), offs, recipe=GROUPED.to_recipe())
    row_expert = torch.tensor([0] * 7 + [2] * 23 + [3] * 20)
    if experts is TitanExperts:
        expected = product(F.silu(product(x, module.w1)) * product(x, module.w3), module.w2) + module.bias[row_expert]
    else:
        h = product(x, module.gate_up_proj.mT) + module.gate_up_proj_bias[row_expert]
        expected = product(F.silu(h[:, :HIDDEN]) * h[:, HIDDEN:], module.down_proj.mT) + module.down_proj_bias[row_expert]
    assert torch.equal(y, expected)
    y.float().square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in module.parameters())


# ---- optimizers, gradients, FSDP, compile --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ({"fused": True}, {"foreach": True}, {"foreach": False}, {}), ids=str)
def test_optimizers_step_as_on_plain_parameters(kind):
    """Optimizers treat converted parameters as plain ones: the same gradients give the same weights, and the optimizer state from
    before the conversion is kept."""
    model, plain = make(), make()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, **kind) for each in (model, plain)]
    for step in range(3):
        if step == 1:
            moxie.quantize_(model, "mxfp8_rceil")
        for each, optimizer in zip((model, plain), optimizers):
            for i, parameter in enumerate(each.parameters()):
                parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i + 100 * step)).to(
                    parameter
                )
            optimizer.step()
    for a, b in zip(model.parameters(), plain.parameters()):
        assert torch.equal(a, b)
        assert optimizers[0].state[a]["step"] == 3
    assert isinstance(model.layers[0].moe.experts.w1, ConvertedParameter)


def test_foreach_stays_the_default_of_optimizers():
    from torch.optim.optimizer import _foreach_supported_types

    moxie.quantize_(TitanExperts(), GROUPED)
    assert ConvertedParameter in _foreach_supported_types


def test_copies_of_a_model_are_converted_and_independent():
    model = make()
    moxie.quantize_(model, "mxfp8_rceil")
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    expected = model(batch())
    for other in (twin, loaded):
        w = other.layers[0].moe.experts.w1
        assert is_converted(w) and isinstance(w, nn.Parameter) and w is not model.layers[0].moe.experts.w1
        assert w._moxie is not model.layers[0].moe.experts.w1._moxie
        assert torch.equal(other(batch()), expected)
    train(twin, 2)
    assert torch.equal(model(batch()), expected)


def test_moving_averages_of_weights_work():
    model = make()
    moxie.quantize_(model, "mxfp8_rceil")
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    train(model, 2)
    average.update_parameters(model)
    train(model, 2)
    average.update_parameters(model)
    assert is_converted(average.module.layers[0].moe.experts.w1)
    assert torch.equal(average(batch()).isfinite(), torch.ones_like(average(batch()), dtype=torch.bool))


def test_assigned_and_materialised_parameters_stay_converted():
    state = make(seed=3).state_dict()
    for assign in (False, True):
        model = make()
        moxie.quantize_(model, "mxfp8_rceil")
        model.load_state_dict(state, assign=assign)
        expected = make(seed=3)
        moxie.quantize_(expected, "mxfp8_rceil")
        assert torch.equal(model(batch()), expected(batch()))
    with torch.device("meta"):
        model = LanguageModel()
    moxie.quantize_(model, "mxfp8_rceil")
    model.to_empty(device="cpu")
    assert is_converted(model.layers[0].moe.experts.w1) and isinstance(model.layers[0].moe.experts.w1, nn.Parameter)
    model.load_state_dict(state)
    assert torch.equal(model(batch()), expected(batch()))
    assert all(type(value) is torch.Tensor for value in model.state_dict().values())


def test_sharded_parameters_are_converted_when_they_are_gathered(tmp_path):
    """FSDP2 replaces parameters by gathered ones while the model computes. Those must be converted too."""
    distributed = pytest.importorskip("torch.distributed")
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        mesh = distributed.init_device_mesh("cpu", (1,))
        for parameters, policy in ((torch.bfloat16, {}), (torch.float32, {"param_dtype": torch.bfloat16})):
            model, expected = make(dtype=parameters), make()
            for each in (model, expected):
                report = moxie.quantize_(each, "mxfp8_rceil")
            for part in (model.layers[0], model):
                fsdp.fully_shard(part, mesh=mesh, mp_policy=fsdp.MixedPrecisionPolicy(**policy))
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="quantize_")
                losses = [loss_of(each, batch()) for each in (model, expected)]
            assert torch.equal(*losses) and report.unused == []
            for loss in losses:
                loss.backward()
            w = model.layers[0].moe.experts.w1
            assert sqnr(w.grad.to_local(), expected.layers[0].moe.experts.w1.grad) > 40
            state = {name: value.clone() for name, value in model.state_dict().items()}
            torch.optim.AdamW(model.parameters()).step()
            assert loss_of(model, batch()) < losses[0]
            model.load_state_dict(state)
            assert torch.equal(loss_of(model, batch()), losses[0])
            moxie.unquantize_(model)
            assert torch.equal(loss_of(model, batch()), loss_of(make(), batch()))
    finally:
        distributed.destroy_process_group()


def test_gradients_and_every_other_op_are_plain():
    experts = TitanExperts()
    moxie.quantize_(experts, "mxfp8_rceil")
    w = experts.w1
    plain = w.detach()
    assert type(plain) is torch.Tensor and type(w.data) is torch.Tensor
    for function in (
        lambda w: w + 1,
        lambda w: w.sum(),
        lambda w: w.norm(),
        lambda w: torch.einsum("gnk,gnk->g", w, w),
        lambda w: torch.cat([w, w]),
        lambda w: w.square().mean(0),
        lambda w: w @ torch.ones(DIM),
        lambda w: (
            torch._grouped_mm(
                torch.ones(8, EXPERTS * 16).bfloat16(),
                torch.ones(64, 16).bfloat16(),
                offs=torch.tensor([16, 32, 48, 64], dtype=torch.int32),
            )
            * w.sum()
        ),
    ):
        out = function(w)
        assert type(out) is torch.Tensor and torch.equal(out, function(plain))
    (w.transpose(-2, -1) * 2).sum().backward()
    assert type(w.grad) is torch.Tensor and torch.equal(w.grad, torch.full_like(plain, 2))
    with torch.no_grad():
        assert w.mul_(2) is w and is_converted(w)
    assert torch.nn.utils.clip_grad_norm_([w], 1.0) > 1 and repr(w)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_products_mean_what_they_mean_in_torch(dtype):
    holder = nn.Module()
    holder.w = nn.Parameter(torch.randn(3, 32, 64, dtype=dtype))
    # A recipe that does not quantize: products run through Moxie, and must round as torch's do.
    moxie.quantize_(holder, moxie.Recipe("none"))
    w, plain, x = holder.w, holder.w.detach(), torch.randn(10, 64, dtype=dtype)
    vector, matrix = torch.randn(32, dtype=dtype), torch.randn(10, 32, dtype=dtype)
    batched = torch.randn(3, 5, 64, dtype=dtype)
    for function in (
        lambda w: F.linear(x, w[1]),
        lambda w: F.linear(x, w[1], vector),
        lambda w: F.linear(x[0], w[1], bias=vector),
        lambda w: F.linear(input=x[None], weight=w[0], bias=vector),
        lambda w: x @ w[2].T,
        lambda w: torch.mm(x, w[2].t()),
        lambda w: x.mm(mat2=w[0].t()),
        lambda w: torch.matmul(x[None, None], w[0].mT),
        lambda w: torch.addmm(vector, x, w[1].T),
        lambda w: vector.addmm(x, w[1].T),
        lambda w: torch.addmm(matrix, x, w[1].T, beta=0.5, alpha=2),
        lambda w: batched @ w.mT,
        lambda w: torch.bmm(batched, w.mT),
        lambda w: w[1] @ x.T,
        lambda w: torch.matmul(w[1].T, matrix.T),
        lambda w: x @ w.select(0, 1).transpose(0, 1),
        lambda w: x @ w.mT,
        lambda w: x[None] @ w.mT,
        lambda w: w @ batched.mT,
        lambda w: torch.bmm(w, batched.mT),
    ):
        holder.w._moxie.used = False
        actual, expected = function(w), function(plain)
        assert holder.w._moxie.used and type(actual) is torch.Tensor
        assert actual.shape == expected.shape and actual.dtype == dtype and sqnr(actual, expected) > 40
        w.grad = None
        actual.sum().backward()
        assert type(w.grad) is torch.Tensor


def test_a_bias_is_added_to_the_product_of_experts():
    experts = TitanExperts().bfloat16()
    moxie.quantize_(experts, "mxfp8_rceil")
    x, offs = torch.randn(30, DIM, dtype=torch.bfloat16), torch.tensor([7, 7, 20, 28], dtype=torch.int32)
    bias = torch.randn(EXPERTS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    y = torch._grouped_mm(x, experts.w1.mT, offs=offs, bias=bias)
    assert torch.equal(y, moxie.grouped_mm(x, experts.w1.detach(), offs, recipe="mxfp8_rceil", bias=bias))
    y.sum().backward()
    assert bias.grad[:, 0].tolist() == [7, 0, 13, 8]


def test_a_compiled_model_reads_its_weight_caches():
    torch._dynamo.reset()
    results = []
    for cached in (True, False):
        experts = HuggingExperts().bfloat16()
        experts.load_state_dict(
            {
                name: torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1
                for name, value in experts.state_dict().items()
            }
        )
        moxie.quantize_(experts, moxie.MXFP8GroupedMMConfig(weight_cache="kn" if cached else False))
        optimizer = torch.optim.SGD(experts.parameters(), lr=1.0)
        if cached:
            moxie.refresh_after(experts, optimizer)
        function = torch.compile(experts, fullgraph=True, backend="aot_eager") if cached else experts
        x = torch.randn(50, DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
        for _ in range(3):
            loss = function(x, torch.tensor([7, 7, 30, 50], dtype=torch.int32)).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            results.append(loss.item())
        if cached:  # and nothing but them
            experts.gate_up_proj_cache.qdata.zero_()
            experts.down_proj_cache.qdata.zero_()
            zero = function(x, torch.tensor([7, 7, 30, 50], dtype=torch.int32))
            assert torch.equal(zero[:7], experts.down_proj_bias[0].expand(7, -1))
    assert results[:3] == results[3:] and results[2] < results[0]


def test_autocast_reaches_converted_parameters():
    holder = nn.Module()
    holder.w = nn.Parameter(torch.randn(2, 32, 64))
    moxie.quantize_(holder, "mxfp8_rceil")
    x, offs = torch.randn(9, 64), torch.tensor([4, 9], dtype=torch.int32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch._grouped_mm(x, holder.w.mT, offs=offs)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, moxie.grouped_mm(x.bfloat16(), holder.w.detach(), offs, recipe="mxfp8_rceil"))  # w from f32
    y.sum().backward()
    assert holder.w.grad.dtype == torch.float32


@pytest.mark.parametrize("experts, weight_cache", ((TitanExperts, True), (HuggingExperts, "kn")))
def test_weight_caches_follow_the_optimizer_and_the_state_dict(experts, weight_cache):
    cached, plain = make(experts), make(experts)
    config = moxie.MXFP8GroupedMMConfig(weight_cache=weight_cache)
    linear = moxie.MXLinearConfig(weight_cache=True)
    keys = {"re:.*experts.*": config, "re:.*shared_expert.*": linear}
    report = moxie.quantize_(cached, moxie.FqnToConfig(keys))
    moxie.quantize_(plain, moxie.FqnToConfig({"re:.*experts.*": GROUPED, "re:.*shared_expert.*": LINEAR}))
    assert "cached" in str(report) and cached.state_dict().keys() == plain.state_dict().keys()
    # These experts multiply by the parameter itself, not by a bf16 copy of it, so the product must use its cache.
    if experts is HuggingExperts:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("moxie.converted.grouped_mm", lambda x, *args, quantized_w, **kwargs: x if quantized_w else 1 / 0)
            torch._grouped_mm(
                torch.ones(4, DIM), cached.layers[0].moe.experts.gate_up_proj, offs=torch.ones(4, dtype=torch.int32)
            )
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (cached, plain)]
    moxie.refresh_after(cached, optimizers[0])
    assert train(cached, 4, optimizers[0]) == train(plain, 4, optimizers[1])
    for assign in (False, True):
        state = make(experts, seed=5 + assign).state_dict()
        for model in (cached, plain):
            model.load_state_dict(state, assign=assign)
        assert torch.equal(cached(batch()), plain(batch()))
    cached.float(), plain.float()
    moxie.refresh_(cached)
    assert cached.layers[0].moe.shared_expert.up.weight_cache.qdata.dtype == torch.float8_e4m3fn
    moxie.unquantize_(cached)
    assert [name for name, _ in cached.named_modules()] == [name for name, _ in make(experts).named_modules()]
