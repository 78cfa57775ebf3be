"""moxie.torchtitan with TorchTitan 0.2: registered model converters (docs/TORCHTITAN.md)."""

import pytest
import torch
from torch import nn

import moxie
from grouped_reference import sqnr

pytest.importorskip("torchtitan", reason="TorchTitan is not installed: make titan", exc_type=ImportError)
moe_module = pytest.importorskip("torchtitan.models.moe.moe", reason="this is not TorchTitan 0.2", exc_type=ImportError)

from torchtitan.config import ConfigManager
from torchtitan.models.moe import kernels
from torchtitan.protocols.model_converter import build_model_converters

FLAGS = ["--job.custom_config_module=moxie.torchtitan", "--model.converters=moxie.experts,moxie.linears"]


class Model(nn.Module):
    def __init__(self, device):
        super().__init__()
        args = moe_module.MoEArgs(num_experts=4, top_k=2, num_shared_experts=1, load_balance_coeff=None)
        self.moe = moe_module.MoE(args, dim=64, hidden_dim=96)
        self.output = nn.Linear(64, 32)
        self.to(device, torch.bfloat16)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=0.1)

    def forward(self, x):
        return self.output(self.moe(x))


@pytest.fixture
def without_gpu(monkeypatch):
    """Replaces what TorchTitan's MoE.forward calls and a CPU lacks: torch.histc of integers, and a Triton kernel, by its
    reference."""
    histc, kernel = torch.histc, kernels.fill_indices_wrapper

    def counted(x, bins, min, max):
        on_cpu = x.device.type == "cpu" and not x.is_floating_point()
        return torch.bincount(x.flatten(), minlength=bins)[:bins] if on_cpu else histc(x, bins, min, max)

    def filled(counts, *args):
        return (kernels.fill_indices_cpu if counts.device.type == "cpu" else kernel)(counts, *args)

    monkeypatch.setattr(torch, "histc", counted)
    monkeypatch.setattr(kernels, "fill_indices_wrapper", filled)


def convert(model, *flags):
    config = ConfigManager().parse_args([*FLAGS, *flags])
    build_model_converters(config, None).convert(model)
    return model


def test_a_moe_layer_converts_and_trains(without_gpu, device):
    stock = Model(device)
    model = Model(device)
    model.load_state_dict(stock.state_dict())
    convert(model, "--moxie.experts.fqns=experts", "--moxie.experts.recipe=mxfp8_rceil")
    assert model.state_dict().keys() == stock.state_dict().keys()
    assert isinstance(model.moe.shared_experts.w1, moxie.MXLinear)
    assert type(model.moe.router.gate) is nn.Linear and type(model.output) is nn.Linear
    x = torch.randn(2, 32, 64, device=device, dtype=torch.bfloat16)
    results = []
    for one in (stock, model):
        y = one(x)
        y.square().mean().backward()
        results.append((y, one.moe.experts.w1.grad))
    for expected, got in zip(*results):
        assert 20 < sqnr(got, expected) < 60  # quantized, and right


def test_flags_choose_by_parts_of_names():
    model = convert(Model("cpu"), "--quantize.grouped_mm.mx.fqns=experts", "--moxie.linears.fqns=shared_experts.w1,output")
    linears = {name for name, module in model.named_modules() if isinstance(module, moxie.MXLinear)}
    assert linears == {"moe.shared_experts.w1", "output"}
    assert {name for name, parameter in model.named_parameters() if hasattr(parameter, "_moxie")} == {
        "moe.experts.w1", "moe.experts.w2", "moe.experts.w3"
    }  # fmt: skip


def test_a_choice_of_nothing_is_refused():
    with pytest.raises(ValueError, match="nothing to convert"):
        convert(Model("cpu"), "--moxie.experts.fqns=expertz")
