"""Code written for torchao runs with Moxie: MXFP8Linear, the attributes and ops of MXTensor, and torchao's own objects."""

import inspect

import pytest
import torch
from torch import nn

import moxie
from grouped_reference import gaussian, run, sqnr
from moe_models import batch, loss_of, make
from moxie import torchao_compat as compat
from moxie.torchao_compat import KernelPreference, MXFP8Linear, MXTensor, ScaleCalculationMode
from support import assert_same_bytes

E4M3 = torch.float8_e4m3fn

# ---- MXFP8Linear --------------------------------------------------------------------------------------------------------------


def recipe_of(linear) -> moxie.Recipe:
    return moxie.Recipe.from_name(linear.conversion.recipe)


def test_the_linear_is_1x32_rceil_unless_told_otherwise():
    for linear in (MXFP8Linear(64, 96), MXFP8Linear.from_float(nn.Linear(64, 96))):
        assert recipe_of(linear) == moxie.Recipe.from_name("mxfp8_rceil")


def test_the_linear_has_the_accuracy_of_1x32_where_blocks_hold_outliers(device):
    """MXFP8Linear quantizes in blocks of 1x32, as torchao does, so an outlier costs the accuracy of 31 elements only. Here one
    element in 128 is 2^16 times as large, which in a block of 1x128 costs that of all others."""
    torch.manual_seed(0)
    linear = MXFP8Linear(512, 64, bias=False, device=device)
    x = torch.randn(64, 512, device=device)
    x[:, ::128] *= 2.0**16
    rest = x.clone()
    rest[:, ::128] = 0
    # The weights that meet outliers are 0, so y depends only on the other elements and shows how accurate these are.
    with torch.no_grad():
        linear.weight[:, ::128] = 0
    expected = rest @ linear.weight.t()
    coarse = moxie.MXLinear(512, 64, bias=False, device=device)
    coarse.load_state_dict(linear.state_dict())
    assert sqnr(linear(x), expected) > sqnr(coarse(x), expected) + 3


@pytest.mark.parametrize("hp", (False, True))
@pytest.mark.parametrize("mode", ("rceil", "floor"))
def test_the_linear_takes_the_arguments_of_torchao(mode, hp, device):
    linear = MXFP8Linear(
        96,
        40,
        bias=True,
        device=device,
        dtype=torch.bfloat16,
        kernel_preference=KernelPreference.EMULATED,
        scale_calculation_mode=ScaleCalculationMode(mode),
        wgrad_with_hp=hp,
    )
    assert recipe_of(linear) == moxie.Recipe(rule=mode, kernels="emulated", wgrad_with_hp=hp)
    plain = moxie.MXLinear(96, 40, device=device, dtype=torch.bfloat16, config=recipe_of(linear))
    plain.load_state_dict(linear.state_dict())
    x = torch.randn(2, 5, 96, dtype=torch.bfloat16, device=device, requires_grad=True)
    gradients = lambda module: torch.autograd.grad(module(x).float().square().sum(), (x, module.weight, module.bias))
    assert_same_bytes(gradients(linear), gradients(plain))


def test_the_attributes_of_the_linear_are_read_and_assigned_to():
    linear = MXFP8Linear(64, 96)
    assert linear.kernel_preference is KernelPreference.AUTO and linear.wgrad_with_hp is False
    assert linear.scale_calculation_mode is ScaleCalculationMode.RCEIL
    linear.wgrad_with_hp = True
    linear.kernel_preference = "emulated"
    linear.scale_calculation_mode = ScaleCalculationMode.FLOOR
    assert recipe_of(linear) == moxie.Recipe(rule="floor", kernels="emulated", wgrad_with_hp=True)
    with pytest.raises(TypeError, match="wgrad_with_hp must be True or False"):
        linear.wgrad_with_hp = 1
    assert linear.wgrad_with_hp is True


def test_the_linear_is_converted_and_restored_like_any_other():
    model = nn.Sequential(MXFP8Linear(64, 64), nn.Linear(64, 64))
    assert len(moxie.quantize_(model, "mxfp8_rceil_128").converted) == 2
    assert type(model[0]) is MXFP8Linear and recipe_of(model[0]) == moxie.Recipe.from_name("mxfp8_rceil_128")
    model[0].wgrad_with_hp = True
    assert recipe_of(model[0]).weights == "128x128"
    moxie.unquantize_(model)
    assert type(model[0]) is nn.Linear


def test_a_config_and_its_fields_are_not_both_taken():
    assert recipe_of(MXFP8Linear(64, 96, config="mxfp8_rceil_128")).weights == "128x128"
    with pytest.raises(ValueError, match="config is in place of kernel_preference"):
        MXFP8Linear(64, 96, config="mxfp8_rceil_128", wgrad_with_hp=True)


# ---- MXTensor -----------------------------------------------------------------------------------------------------------------


def test_an_mxtensor_has_the_attributes_of_torchao():
    mx = MXTensor.to_mx(torch.randn(8, 256), E4M3, 32, ScaleCalculationMode.FLOOR, KernelPreference.EMULATED)
    assert mx.elem_dtype == E4M3 and mx.block_size == 32 and mx.orig_dtype == torch.float32
    assert mx.kernel_preference is KernelPreference.EMULATED and mx.is_swizzled_scales is False and mx.act_quant_kwargs is None
    for other in (mx.clone(), mx.detach(), mx[2:4], mx.view(2, 4, 256), mx.t()):
        assert other.kernel_preference is KernelPreference.EMULATED and other.block_size == 32
    assert MXTensor.to_mx(torch.randn(8, 256), block="1x128").block_size == 128
    with pytest.raises(AttributeError, match="blocks of 32x32 have no block_size"):
        _ = MXTensor.to_mx(torch.randn(32, 256), block="32x32").block_size


def test_the_constructor_of_torchao_has_eight_arguments():
    qdata, scale = moxie.quantize_rowwise(torch.randn(8, 64))
    expected = MXTensor.from_qdata_and_scales(qdata, scale, torch.bfloat16)
    names = ("elem_dtype", "block_size", "orig_dtype", "kernel_preference", "act_quant_kwargs", "is_swizzled_scales")
    values = (E4M3, 32, torch.bfloat16, KernelPreference.AUTO, None, False)
    for mx in (MXTensor(qdata, scale, *values), MXTensor(qdata, scale, **dict(zip(names, values)))):
        assert mx.dtype == torch.bfloat16 and mx.block == "1x32" and mx.kernel_preference is KernelPreference.AUTO
        assert torch.equal(mx.dequantize(), expected.dequantize())


@pytest.mark.parametrize(
    "change, words",
    (
        (dict(elem_dtype=torch.float8_e5m2), "elem_dtype must be the dtype of qdata"),
        (dict(block_size=16), "block_size must be 32, the block of the MX format, or 128"),
        (dict(orig_dtype=torch.float16), "orig_dtype must be torch.bfloat16 or torch.float32"),
        (dict(act_quant_kwargs=object()), "the recipe of the product"),
        (dict(is_swizzled_scales=True), "moxie.unswizzle_scale(scale, rows, cols) makes them so"),
    ),
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_constructor_refuses_what_it_cannot_hold(change, words):
    qdata, scale = moxie.quantize_rowwise(torch.randn(8, 64))
    given = dict(elem_dtype=E4M3, block_size=32, orig_dtype=torch.bfloat16, kernel_preference=None) | change
    with pytest.raises((TypeError, ValueError)) as error:
        MXTensor(qdata, scale, **given)
    assert words in str(error.value)


def test_t_exchanges_rows_and_columns_and_moves_nothing(device):
    for block in ("1x32", "128x32", "32x32"):
        x = torch.randn(64, 96, device=device, requires_grad=True)
        mx = MXTensor.to_mx(x, block=block)
        assert mx.t().shape == (96, 64) and mx.t().qdata.data_ptr() == mx.qdata.data_ptr()
        assert torch.equal(mx.t().dequantize(), mx.dequantize().t()) and torch.equal(mx.t().t().dequantize(), mx.dequantize())
        dy = torch.randn(96, 64, device=device)
        mx.t().dequantize().backward(dy)
        assert torch.equal(x.grad, dy.t())
        assert torch.equal(mx.t()[:32].dequantize(), mx.dequantize().t()[:32])


def test_a_transposed_mxtensor_is_no_activation():
    mx = MXTensor.to_mx(torch.randn(64, 64)).t()
    with pytest.raises(ValueError, match="x must be quantized along its columns.*give x.t()"):
        moxie.grouped_mm(mx, torch.randn(1, 32, 64), recipe="mxfp8_rceil")
    with pytest.raises(NotImplementedError, match="matrices alone"):
        MXTensor.to_mx(torch.randn(2, 4, 64)).t()


def test_copy_writes_elements_and_scales(device):
    source, to = (MXTensor.to_mx(torch.randn(8, 64, device=device) * factor) for factor in (1, 1000))
    qdata = to.qdata
    assert to.copy_(source) is to and to.qdata is qdata
    assert_same_bytes((to.qdata, to.scale), (source.qdata, source.scale))


@pytest.mark.parametrize(
    "copy, words",
    (
        (lambda mx: mx.copy_(torch.zeros(8, 64)), "quantize what is copied: MXTensor.to_mx(x, block='1x32')"),
        (lambda mx: torch.zeros(8, 64).copy_(mx), "copy mx.dequantize()"),
        (lambda mx: mx.copy_(MXTensor.to_mx(torch.zeros(8, 64), block="1x128")), "copy_ keeps shape, dtype and block"),
    ),
)
def test_copies_that_would_not_be_exact_are_refused(copy, words):
    with pytest.raises((NotImplementedError, ValueError)) as error:
        copy(MXTensor.to_mx(torch.randn(8, 64)))
    assert words in str(error.value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs a GPU")
def test_pinned_memory_holds_both_parts():
    mx = MXTensor.to_mx(torch.randn(8, 64))
    pinned = mx.pin_memory()
    assert pinned.is_pinned() and pinned.qdata.is_pinned() and pinned.scale.is_pinned() and not mx.is_pinned()
    assert_same_bytes((pinned.qdata, pinned.scale), (mx.qdata, mx.scale))


@pytest.mark.parametrize("cols", (32, 100, 256))
def test_a_vector_is_quantized_as_one_row(cols, device):
    x = torch.randn(cols, device=device, requires_grad=True)
    mx = MXTensor.to_mx(x, E4M3, 32)
    assert mx.shape == (cols,) and mx.scale.shape == (-(-cols // 32),)
    row = MXTensor.to_mx(x.detach()[None])
    assert torch.equal(mx.dequantize(), row.dequantize()[0]) and torch.equal(row[0].dequantize(), mx.dequantize())
    assert mx[None].shape == (1, cols) and mx.view(1, cols).shape == (1, cols)
    mx.dequantize().sum().backward()
    assert x.grad.eq(1).all()


@pytest.mark.parametrize(
    "kwargs, words",
    (
        (dict(block_size=16), "block_size must be 32, the block of the MX format, or 128"),
        (dict(block_size=64), "quantize and dequantize them with torchao"),
        (dict(is_swizzled_scales=True), "moxie.swizzle_scale(mx.scale) makes swizzled ones"),
        (dict(elem_dtype=torch.float8_e5m2), "elem_dtype must be torch.float8_e4m3fn, got torch.float8_e5m2; Moxie has no other"),
        (dict(block="32x32"), "in blocks one row tall"),
    ),
    ids=str,
)
def test_what_to_mx_does_not_make_is_refused_with_the_way_out(kwargs, words):
    with pytest.raises((TypeError, ValueError)) as error:
        MXTensor.to_mx(torch.randn(64), **kwargs)
    assert words in str(error.value)


def test_kernel_preferences_pass_through_a_graph():
    torch._dynamo.reset()
    problem = gaussian([37, 0, 64], 64, 96)

    def product(x, w_t):
        mx = MXTensor.to_mx(x, E4M3, 32, ScaleCalculationMode.RCEIL, KernelPreference.EMULATED)
        y = compat._to_mxfp8_then_scaled_grouped_mm(mx, w_t, problem.offs)
        return y + compat._to_mxfp8_then_scaled_grouped_mm(x, w_t, problem.offs, prequantized_A=(mx.qdata, mx.scale))

    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(problem.x, problem.w.mT), product(problem.x, problem.w.mT))


# ---- biases and configs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", (40, 1))
def test_rows_past_the_last_group_have_no_bias(rows):
    x, w, offs = torch.randn(40, 64), torch.randn(2, 96, 64), torch.tensor([13, 30], dtype=torch.int32)
    bias = torch.randn(rows, 96, requires_grad=True)
    y = compat._to_mxfp8_then_scaled_grouped_mm(x, w.mT, offs, bias, torch.float32)
    one_per_group = bias.detach()[:1].expand(2, -1).contiguous()
    if rows == 1:
        assert torch.equal(y, compat._to_mxfp8_then_scaled_grouped_mm(x, w.mT, offs, one_per_group, torch.float32))
    assert y[:30].abs().min() > 0 and not y[30:].any()
    y.sum().backward()
    expected = torch.ones(40, 96).where(torch.arange(40).unsqueeze(1) < 30, 0.0)
    assert torch.equal(bias.grad, expected if rows > 1 else expected.sum(0, keepdim=True))


@pytest.mark.parametrize("rows", (1, 101))
def test_a_bias_per_row_is_added_as_torchao_adds_it(rows):
    problem = gaussian([37, 0, 64], 64, 96)
    bias = torch.randn(rows, 64, dtype=torch.bfloat16, requires_grad=True)
    y = compat._to_mxfp8_then_scaled_grouped_mm(problem.x, problem.w.mT, problem.offs, bias)
    assert torch.equal(y, run(problem, "mxfp8_rceil").y + bias)
    y.backward(problem.dy)
    assert torch.equal(bias.grad, problem.dy if rows > 1 else problem.dy.sum(0, keepdim=True))


def test_positional_arguments_of_the_configs_are_those_of_torchao():
    grouped = compat.MXFP8TrainingOpConfig(KernelPreference.EMULATED, torch.bfloat16, True, ScaleCalculationMode.FLOOR, True)
    assert grouped.to_recipe() == moxie.Recipe(rule="floor", kernels="emulated", out="bfloat16", wgrad_with_hp=True)
    dim0, dim1 = compat.MXFP8Dim0CastKernelChoice.TORCH, compat.MXFP8Dim1CastKernelChoice.CUDA
    linear = compat.MXLinearConfig(32, E4M3, None, None, KernelPreference.AUTO, dim0, dim1, ScaleCalculationMode.FLOOR)
    assert linear.to_recipe() == moxie.Recipe(rule="floor") and linear.mxfp8_dim1_cast_kernel_choice is dim1
    assert compat.FP8GroupedMMConfig(E4M3, torch.bfloat16, True).to_recipe() == moxie.Recipe("row", out="bfloat16")


def test_configs_are_assigned_to_between_recipe_and_use():
    config = compat.MXFP8TrainingOpConfig.from_recipe(compat.MXFP8TrainingRecipe.MXFP8_RCEIL)
    config.kernel_preference = KernelPreference.EMULATED
    config.wgrad_with_hp = True
    config.pad_token_groups_for_grouped_mm = True
    config.dim1_cast_kernel_choice = compat.MXFP8Dim1CastKernelChoice.CUDA  # no field, in torchao either
    problem = gaussian([37, 0, 64], 64, 96)
    y = compat._quantize_then_scaled_grouped_mm(problem.x, problem.w.mT, config, problem.offs)
    assert torch.equal(y, run(problem, "mxfp8_rceil_wgrad_with_hp").y)
    assert config.to_recipe() == moxie.Recipe(kernels="emulated", wgrad_with_hp=True)


# ---- with torchao's own objects ----------------------------------------------------------------------------------------------

needs_torchao = pytest.mark.skipif(not compat.HAS_TORCHAO, reason="torchao is not installed")


def their(module: str, name: str):
    return getattr(pytest.importorskip(f"torchao.{module}"), name)


@needs_torchao
def test_the_linear_has_the_arguments_and_defaults_of_torchao():
    parameters_of = lambda kind: inspect.signature(kind.__init__).parameters
    plain = lambda value: getattr(value, "value", value)
    ours = parameters_of(MXFP8Linear)
    for name, theirs in parameters_of(their("prototype.moe_training.mxfp8_linear", "MXFP8Linear")).items():
        assert ours[name].kind == theirs.kind and plain(ours[name].default) == plain(theirs.default)


@needs_torchao
def test_the_linear_is_60_db_from_torchao():
    """60 dB holds without a bias only: torchao rounds y before it adds the bias, and again after."""
    emulated = their("quantization.quantize_.common.kernel_preference", "KernelPreference").EMULATED
    kwargs = dict(bias=False, dtype=torch.bfloat16, kernel_preference=emulated)
    theirs = their("prototype.moe_training.mxfp8_linear", "MXFP8Linear")(64, 96, **kwargs)
    ours = MXFP8Linear(64, 96, **kwargs)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    assert sqnr(ours(x), theirs(x)) > 60


@needs_torchao
def test_the_mxtensor_of_torchao_is_multiplied_as_it_is():
    theirs = their("prototype.mx_formats.mx_tensor", "MXTensor")
    mode = their("prototype.mx_formats.config", "ScaleCalculationMode").RCEIL
    problem = gaussian([37, 0, 64], 64, 96)
    mx = theirs.to_mx(problem.x, E4M3, 32, mode)
    for y in (
        compat._to_mxfp8_then_scaled_grouped_mm(mx, problem.w.mT, problem.offs),
        moxie.grouped_mm(mx, problem.w, problem.offs, recipe="mxfp8_rceil"),
    ):
        assert torch.equal(y, run(problem, "mxfp8_rceil").y)
    for wrong, words in (
        (theirs.to_mx(problem.x, torch.float8_e5m2, 32, mode), "must be torch.float8_e4m3fn, got .*give x.dequantize"),
        (theirs.to_mx(problem.x, E4M3, 16, mode), "block_size must be 32"),
        (theirs.to_mx(problem.x, E4M3, 32, mode).requires_grad_(), "moxie.MXTensor.to_mx, which does"),
        (theirs.to_mx(problem.x, E4M3, 32, mode, is_swizzled_scales=True), "is_swizzled_scales=False, or give x.dequantize"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            moxie.grouped_mm(wrong, problem.w, problem.offs, recipe="mxfp8_rceil")


@needs_torchao
def test_the_configs_of_torchao_are_taken_as_ours():
    mx, fp8 = (their("prototype.moe_training.config", name) for name in ("MXFP8TrainingOpConfig", "Float8TrainingOpConfig"))
    problem = gaussian([37, 0, 64], 64, 96)
    for config, recipe in ((mx(wgrad_with_hp=True), "mxfp8_rceil_wgrad_with_hp"), (fp8(), "fp8_rowwise")):
        y = compat._quantize_then_scaled_grouped_mm(problem.x, problem.w.mT, config, problem.offs)
        assert torch.equal(y, run(problem, recipe).y)
    recipe = their("prototype.moe_training.config", "MXFP8TrainingRecipe").MXFP8_RCEIL
    ours, theirs, by_name = make(), make(), make()
    moxie.quantize_(ours, compat.MXFP8TrainingOpConfig(out_dtype=torch.bfloat16))
    moxie.quantize_(theirs, mx.from_recipe(recipe))
    moxie.quantize_(by_name, moxie.FqnToConfig({"re:.*experts.*": mx.from_recipe(recipe)}))
    assert torch.equal(loss_of(theirs, batch()), loss_of(ours, batch()))
    assert torch.equal(loss_of(by_name, batch()), loss_of(ours, batch()))


@needs_torchao
def test_a_config_of_torchao_that_does_not_train_is_refused_by_name():
    config = their("quantization", "Int8WeightOnlyConfig")()
    with pytest.raises(TypeError, match="quantize_: Int8WeightOnlyConfig of torchao .* give an MXFP8GroupedMMConfig"):
        moxie.quantize_(nn.Linear(64, 64), config)
