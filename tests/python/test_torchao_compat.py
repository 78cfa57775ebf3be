"""moxie.torchao_compat has functions with torchao's names, arguments and meaning. torchao's own quantize_ takes Moxie's
configs."""

import inspect

import pytest
import torch
from torch import nn

import moxie
from grouped_reference import gaussian, run, sqnr
from moe_models import TitanExperts, batch, loss_of, make
from moxie import torchao_compat as compat
from moxie.converted import is_converted

SIZES = [64, 32, 128]


def multiply(function, problem, *args, **kwargs):
    x, w = problem.x.detach().requires_grad_(), problem.w.detach().requires_grad_()
    y = function(x, w.transpose(-2, -1), *args, **kwargs)
    y.backward(problem.dy.to(y.dtype))
    return y.detach(), x.grad, w.grad


def assert_same(results, expected) -> None:
    assert all(torch.equal(a, b) for a, b in zip(results, expected))


# ---- without torchao ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hp", (False, True))
@pytest.mark.parametrize("mode", compat.ScaleCalculationMode)
def test_mxfp8_function(mode, hp):
    problem = gaussian([37, 0, 64], 64, 96)
    recipe = moxie.Recipe(rule=mode.value, wgrad_with_hp=hp)
    results = multiply(
        compat._to_mxfp8_then_scaled_grouped_mm,
        problem,
        problem.offs,
        None,
        torch.bfloat16,
        compat.KernelPreference.EMULATED,
        hp,
        mode,
        True,
    )
    assert_same(results, run(problem, recipe))


def test_fp8_function_works_with_its_own_defaults():
    problem = gaussian([37, 0, 64], 64, 96)
    assert_same(multiply(compat._to_fp8_rowwise_then_scaled_grouped_mm, problem, problem.offs), run(problem, "fp8_rowwise"))


def test_dispatch_by_config():
    problem = gaussian([37, 0, 64], 64, 96)
    for config, recipe in ((compat.MXFP8TrainingOpConfig(), "mxfp8_rceil"), (compat.Float8TrainingOpConfig(), "fp8_rowwise")):
        assert_same(multiply(compat._quantize_then_scaled_grouped_mm, problem, config, problem.offs), run(problem, recipe))


def test_the_bias_is_added_and_has_a_gradient():
    problem = gaussian([37, 0, 64], 64, 96, bias="n")
    bias = problem.bias.detach().requires_grad_()
    y, *_ = multiply(compat._to_mxfp8_then_scaled_grouped_mm, problem, problem.offs, bias)
    expected = run(problem, "mxfp8_rceil")
    assert torch.equal(y, expected.y) and torch.equal(bias.grad, expected.dbias)


def test_the_result_has_the_dtype_asked_for():
    problem = gaussian([64, 32], 64, 96, dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float32):
        y = compat._to_mxfp8_then_scaled_grouped_mm(problem.x, problem.w.mT, problem.offs, out_dtype=dtype)
        assert y.dtype == dtype
    assert compat._to_mxfp8_then_scaled_grouped_mm(problem.x, problem.w.mT, problem.offs).dtype == torch.bfloat16


@pytest.mark.parametrize("hp", (False, True))
def test_quantized_activations_need_no_high_precision_wgrad(hp):
    problem = gaussian(SIZES, 64, 96)
    mx = compat.MXTensor.from_qdata_and_scales(*moxie.quantize_rowwise(problem.x), torch.bfloat16)
    w = problem.w.detach().requires_grad_()
    y = compat._to_mxfp8_then_scaled_grouped_mm(mx, w.mT, problem.offs, wgrad_with_hp=hp)
    y.backward(problem.dy)
    expected = run(problem, moxie.Recipe(wgrad_with_hp=hp))
    assert torch.equal(y, expected.y) and sqnr(w.grad, expected.dw) > 30


def test_the_functions_compile_without_breaks():
    torch._dynamo.reset()
    problem, config = gaussian([37, 0, 64], 64, 96), compat.MXFP8TrainingOpConfig(wgrad_with_hp=True)

    def product(x, w_t):
        return (
            compat._to_mxfp8_then_scaled_grouped_mm(x, w_t, problem.offs, wgrad_with_hp=True)
            + compat._to_fp8_rowwise_then_scaled_grouped_mm(x, w_t, problem.offs)
            + compat._quantize_then_scaled_grouped_mm(x, w_t, config, problem.offs)
        )

    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    assert_same(multiply(compiled, problem), multiply(product, problem))


def test_jagged_offsets_are_ends_of_groups_that_cover_all_rows():
    offs = compat.generate_jagged_offs(8, 1024, multiple_of=16, device="cpu")
    assert offs.dtype == torch.int32 and offs.shape == (8,) and offs[-1] == 1024
    sizes = offs.diff(prepend=torch.zeros(1, dtype=torch.int32))
    assert (sizes > 0).all() and (sizes % 16 == 0).all()


def test_later_names_are_the_same_classes():
    assert compat.MXFP8TrainingOpConfig is moxie.MXFP8GroupedMMConfig and issubclass(compat.MXFP8Linear, moxie.MXLinear)
    recipe = compat.MXFP8TrainingRecipe.MXFP8_RCEIL_WGRAD_WITH_HP
    assert compat.MXFP8TrainingOpConfig.from_recipe(recipe).wgrad_with_hp


# ---- with torchao -------------------------------------------------------------------------------------------------------------

torchao = pytest.importorskip("torchao", reason="torchao is not installed") if compat.HAS_TORCHAO else None
needs_torchao = pytest.mark.skipif(torchao is None, reason="torchao is not installed")


@needs_torchao
@pytest.mark.parametrize(
    "module, name",
    (
        ("mxfp8_grouped_mm", "_to_mxfp8_then_scaled_grouped_mm"),
        ("fp8_grouped_mm", "_to_fp8_rowwise_then_scaled_grouped_mm"),
        ("utils", "_quantize_then_scaled_grouped_mm"),
        ("utils", "generate_jagged_offs"),
    ),
)
def test_arguments_have_the_same_names_order_and_defaults(module, name):
    theirs = getattr(pytest.importorskip(f"torchao.prototype.moe_training.{module}"), name)
    plain = lambda value: getattr(value, "value", value)
    ours = inspect.signature(getattr(compat, name)).parameters
    expected = inspect.signature(theirs).parameters
    assert [arg for arg in ours if arg != "prequantized_A"] == list(expected)
    for arg in expected:
        if arg != "device":
            assert plain(ours[arg].default) == plain(expected[arg].default), arg


@needs_torchao
@pytest.mark.parametrize("recipe", ("mxfp8_rceil", "mxfp8_rceil_wgrad_with_hp"))
def test_results_are_60_db_from_torchao(recipe):
    theirs = pytest.importorskip("torchao.prototype.moe_training.mxfp8_grouped_mm")._to_mxfp8_then_scaled_grouped_mm
    preference = pytest.importorskip("torchao.quantization.quantize_.common.kernel_preference").KernelPreference.EMULATED
    problem, hp = gaussian(SIZES, 64, 96), recipe.endswith("hp")
    for ours, expected in zip(
        multiply(
            compat._to_mxfp8_then_scaled_grouped_mm, problem, problem.offs, wgrad_with_hp=hp, kernel_preference=preference
        ),  # their own enum
        multiply(theirs, problem, problem.offs, wgrad_with_hp=hp, kernel_preference=preference),
    ):
        assert sqnr(ours, expected) > 60


@needs_torchao
def test_the_quantize_of_torchao_takes_our_configs():
    from torchao.quantization import FqnToConfig, quantize_

    grouped, linear = compat.MXFP8TrainingOpConfig(), compat.MXLinearConfig()
    model, expected = make(), make()
    quantize_(model, grouped, filter_fn=lambda module, fqn: isinstance(module, TitanExperts))
    quantize_(model, linear, filter_fn=lambda module, fqn: isinstance(module, nn.Linear) and "shared_expert" in fqn)
    keys = {"re:.*experts.*": grouped, "re:.*shared_expert.*": linear}
    moxie.quantize_(expected, moxie.FqnToConfig(keys))
    assert torch.equal(loss_of(model, batch()), loss_of(expected, batch()))
    by_name = make()
    quantize_(
        by_name,
        FqnToConfig(
            {
                "re:layers.0.moe.experts.w[123]": grouped,
                "layers.0.moe.shared_expert.up": linear,
                "re:.*shared_expert.down": linear,
            }
        ),
        filter_fn=None,
    )
    assert is_converted(by_name.layers[0].moe.experts.w1) and not is_converted(by_name.layers[0].moe.experts.bias)
    assert torch.equal(loss_of(by_name, batch()), loss_of(expected, batch()))


@needs_torchao
def test_the_quantize_of_torchao_keeps_what_a_more_exact_key_converted_and_leaves_biases_alone():
    from torchao.quantization import FqnToConfig, quantize_

    floor, rceil = (compat.MXFP8TrainingOpConfig(scale_calculation_mode=mode) for mode in ("floor", "rceil"))
    experts = (model := make()).layers[0].moe.experts
    quantize_(model, FqnToConfig({"layers.0.moe.experts.w1": floor, "re:.*experts.*": rceil}), filter_fn=None)
    assert [w._moxie.config for w in (experts.w1, experts.w2, experts.w3)] == [floor, rceil, rceil]
    assert not is_converted(experts.bias)


@needs_torchao
def test_our_quantize_takes_the_mapping_of_torchao():
    from torchao.quantization import FqnToConfig

    report = moxie.quantize_(make(), FqnToConfig({"re:.*experts.*": compat.MXFP8TrainingOpConfig()}))
    assert len(report.converted) == 3
