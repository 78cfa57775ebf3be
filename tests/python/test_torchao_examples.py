"""The usage examples of torchao's documentation run if only the import is changed; sizes are reduced for a CPU."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import moxie
from grouped_reference import sqnr
from moxie.converted import is_converted
from moxie.torchao_compat import (
    FP8GroupedMMConfig,
    FP8GroupedMMRecipe,
    FqnToConfig,
    KernelPreference,
    MXFP8GroupedMMConfig,
    MXFP8GroupedMMRecipe,
    MXLinear,
    MXLinearConfig,
    MXLinearRecipeName,
    MXTensor,
    ScaleCalculationMode,
    _to_fp8_rowwise_then_scaled_grouped_mm,
    _to_mxfp8_then_scaled_grouped_mm,
    generate_jagged_offs,
    quantize_,
    to_mx,
)

GROUPS, ROWS, N, K = 8, 2048, 128, 96


def operands(device):
    A = torch.randn(ROWS, K, dtype=torch.bfloat16, device=device, requires_grad=True)
    B = torch.randn(GROUPS, N, K, dtype=torch.bfloat16, device=device, requires_grad=True)
    return A, B, generate_jagged_offs(GROUPS, ROWS, device=device)


def test_the_grouped_product_with_default_settings(device):
    A, B, offs = operands(device)
    out = _to_mxfp8_then_scaled_grouped_mm(A, B.transpose(-2, -1), offs)
    labels = torch.ones_like(out)
    loss = F.mse_loss(out, labels)
    loss.backward()
    assert A.grad.isfinite().all() and B.grad.isfinite().all()
    bf16 = torch._grouped_mm(A, B.transpose(-2, -1), offs=offs)
    assert sqnr(out, bf16) >= 27


def test_prequantized_activations_may_be_a_tuple_beside_A(device):
    """A may be passed quantized, as the tuple prequantized_A: y and the gradient of A are the same as if the call quantizes A."""
    A, B, offs = operands(device)
    dynamic = _to_mxfp8_then_scaled_grouped_mm(A, B.transpose(-2, -1), offs)
    dA, dB = torch.autograd.grad(dynamic.float().square().mean(), (A, B))
    A_qdata, A_scale = moxie.quantize_rowwise(A.detach())
    for scale in (A_scale, A_scale.view(torch.uint8)):  # as e8m0, or as bytes
        out = _to_mxfp8_then_scaled_grouped_mm(A, B.transpose(-2, -1), offs, prequantized_A=(A_qdata, scale))
        grads = torch.autograd.grad(out.float().square().mean(), (A, B))
        assert torch.equal(out, dynamic) and torch.equal(grads[0], dA) and sqnr(grads[1], dB) > 30


def test_prequantized_activations_that_do_not_fit_are_refused(device):
    A, B, offs = operands(device)
    qdata, scale = moxie.quantize_rowwise(A.detach())
    for given, words in (
        ((qdata[1:], scale[1:]), "must have the shape of A"),
        (qdata, r"must be \(qdata, scale\)"),
        ((qdata, scale[:, 1:]), "scales of qdata"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            _to_mxfp8_then_scaled_grouped_mm(A, B.transpose(-2, -1), offs, prequantized_A=given)


def test_prequantized_activations_are_an_mxtensor(device):
    A, B, offs = operands(device)
    qdata, scale = moxie.quantize_rowwise(A.detach())
    mx = MXTensor.from_qdata_and_scales(qdata, scale, torch.bfloat16)
    for wgrad_with_hp in (True, False):  # either, not the first alone
        out = _to_mxfp8_then_scaled_grouped_mm(mx, B.transpose(-2, -1), offs, wgrad_with_hp=wgrad_with_hp)
        assert torch.equal(out, _to_mxfp8_then_scaled_grouped_mm(A, B.transpose(-2, -1), offs))
        out.float().square().mean().backward()
    assert B.grad.isfinite().all()


def test_to_mx_and_from_qdata_and_scales_directly(device):
    """to_mx returns the scale first and then the elements, as torchao's does."""
    A, B, offs = operands(device)
    A_scale, A_qdata = to_mx(A, elem_dtype=torch.float8_e4m3fn, block_size=32, scaling_mode=ScaleCalculationMode.RCEIL)
    A_mx = MXTensor.from_qdata_and_scales(A_qdata, A_scale, A.dtype, block_size=32, kernel_preference=KernelPreference.EMULATED)
    out = _to_mxfp8_then_scaled_grouped_mm(
        A_mx, B.transpose(-2, -1), offs, kernel_preference=KernelPreference.EMULATED, wgrad_with_hp=True
    )
    assert torch.equal(out, _to_mxfp8_then_scaled_grouped_mm(A, B.transpose(-2, -1), offs))


class Experts(nn.Module):
    def __init__(self, dim=64, hidden=96, groups=4):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(groups, hidden, dim) * dim**-0.5)
        self.w2 = nn.Parameter(torch.randn(groups, dim, hidden) * hidden**-0.5)

    def forward(self, x, offs):
        h = F.relu(torch._grouped_mm(x, self.w1.transpose(-2, -1), offs=offs))
        return torch._grouped_mm(h, self.w2.transpose(-2, -1), offs=offs)


class MoEModel(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.pre_moe, self.experts, self.post_moe = nn.Linear(dim, dim), Experts(dim), nn.Linear(dim, dim)

    def forward(self, x, offs):
        return self.post_moe(self.experts(self.pre_moe(x), offs))


def test_linears_and_experts_convert_in_a_single_call():
    model = MoEModel().bfloat16()
    config = FqnToConfig(
        fqn_to_config=OrderedDict(
            [
                ("re:.*experts.*", MXFP8GroupedMMConfig.from_recipe(MXFP8GroupedMMRecipe.MXFP8_RCEIL)),
                ("re:^(pre_moe|post_moe)$", MXLinearConfig.from_recipe_name(MXLinearRecipeName.MXFP8_CUBLAS_RCEIL)),
            ]
        )
    )
    report = quantize_(model, config, filter_fn=None)
    assert report.converted == ["pre_moe", "experts.w1", "experts.w2", "post_moe"]
    assert isinstance(model.pre_moe, MXLinear) and is_converted(model.experts.w1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, offs = torch.randn(128, 64, dtype=torch.bfloat16), generate_jagged_offs(4, 128, device="cpu")
    losses = []
    for _ in range(10):
        loss = F.mse_loss(model(x, offs), torch.ones_like(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_conversion_by_a_filter_on_names():
    model = MoEModel()
    target_fqns = ["experts"]

    def moe_module_filter_fn(module: nn.Module, cur_fqn: str) -> bool:
        return any(fqn in cur_fqn for fqn in target_fqns)

    config = MXFP8GroupedMMConfig.from_recipe(MXFP8GroupedMMRecipe.MXFP8_RCEIL)
    assert quantize_(model, config=config, filter_fn=moe_module_filter_fn).converted == ["experts.w1", "experts.w2"]


@pytest.mark.parametrize(
    "recipe, hp, kernels",
    (
        (MXFP8GroupedMMRecipe.MXFP8_RCEIL, False, KernelPreference.AUTO),
        (MXFP8GroupedMMRecipe.MXFP8_RCEIL_WGRAD_WITH_HP, True, KernelPreference.AUTO),
        (MXFP8GroupedMMRecipe.MXFP8_EMULATED_RCEIL, False, KernelPreference.EMULATED),
    ),
)
def test_recipes_set_the_fields_they_name(recipe, hp, kernels):
    config = MXFP8GroupedMMConfig.from_recipe(recipe)
    assert config == MXFP8GroupedMMConfig(
        kernel_preference=kernels, wgrad_with_hp=hp, scale_calculation_mode=ScaleCalculationMode.RCEIL
    )
    assert FP8GroupedMMConfig.from_recipe(FP8GroupedMMRecipe.FP8_ROWWISE) == FP8GroupedMMConfig()


def test_fp8_rowwise_with_its_own_defaults(device):
    A, B, offs = operands(device)
    out = _to_fp8_rowwise_then_scaled_grouped_mm(A, B.transpose(-2, -1), offs)
    assert sqnr(out, torch._grouped_mm(A, B.transpose(-2, -1), offs=offs)) >= 24


def test_groups_need_no_padding(device):
    """Group sizes need not be multiples of anything, with torchao's flag for padding and without it."""
    A, B, _ = operands(device)
    offs = generate_jagged_offs(GROUPS, ROWS, multiple_of=1, device=device)
    plain = _to_mxfp8_then_scaled_grouped_mm(A, B.transpose(-2, -1), offs)
    assert torch.equal(
        plain, _to_mxfp8_then_scaled_grouped_mm(A, B.transpose(-2, -1), offs, pad_token_groups_for_grouped_mm=True)
    )
    assert sqnr(plain, torch._grouped_mm(A, B.transpose(-2, -1), offs=offs)) >= 27


def test_activations_in_1x32_times_weights_in_32x32(device):
    A, B, offs = operands(device)
    out = moxie.grouped_mm(A, B, offs, recipe="mxfp8_rceil_32x32")
    assert sqnr(out, torch._grouped_mm(A, B.transpose(-2, -1), offs=offs)) >= 27
