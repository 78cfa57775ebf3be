"""Models, shardings and error measures that the cases of test_distributed.py share."""

import copy

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import DTensor

import moxie
import moxie.nn

D, F, E, K, T = 128, 512, 4, 2, 24
RECIPES = ("mxfp8_rceil_128", "mxfp8_rceil")
MIXED = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Model(nn.Module):
    """A linear, an MoE layer and a head: the kinds of products in one block of a language model."""

    def __init__(self, dtype=torch.float32, recipe="mxfp8_rceil_128", hidden=F, **layer):
        super().__init__()
        self.up = moxie.MXLinear(D, D, config=recipe, dtype=dtype)
        self.moe = moxie.nn.MoE(D, hidden, E, K, recipe=recipe, dtype=dtype, **layer)
        self.head = nn.Linear(D, D, dtype=dtype)

    def forward(self, x):
        x = x + self.up(x)
        return self.head(x + self.moe(x))


def mesh_of(*shape: int, names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def tokens(seed: int, dtype=torch.bfloat16, count: int = T) -> Tensor:
    return torch.randn(count, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def shard(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy = MIXED, within: tuple[type, ...] = ()) -> nn.Module:
    """Applies fully_shard to each module of the types `within`, and then to the whole model."""
    for module in list(model.modules()):
        if isinstance(module, within) and module is not model:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None}


def accumulated(master: nn.Module, size: int, loss_of=None) -> dict[str, Tensor]:
    """Computes in one process the gradients that ranks average: those of a bf16 copy of the model for each rank's batch, added up
    in f32 and divided by the number of ranks."""
    total: dict[str, Tensor] = {}
    for rank in range(size):
        model = copy.deepcopy(master).bfloat16()
        (loss_of or loss_of_rank)(model, rank).backward()
        for name, grad in gradients(model).items():
            total[name] = grad.float() + (total[name] if name in total else 0)
    return {name: grad / size for name, grad in total.items()}


def loss_of_rank(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    y = model(tokens(100 * step + rank))
    return (y.float() - tokens(7 + 100 * step + rank).float()).square().mean()


def decibels(a: Tensor, b: Tensor) -> float:
    """Returns the SQNR in decibels: the power of b over the power of a - b."""
    noise = (a.double() - b.double()).square().sum()
    return float("inf") if noise == 0 else (10 * torch.log10(b.double().square().sum() / noise)).item()


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor], least: float) -> None:
    """Asserts that each tensor in `got` equals the one in `wanted` to at least `least` dB; bit for bit if that is infinite."""
    assert got.keys() == wanted.keys(), got.keys() ^ wanted.keys()
    for name in wanted:
        assert got[name].dtype == wanted[name].dtype and decibels(got[name], wanted[name]) >= least, (
            name,
            decibels(got[name], wanted[name]),
        )


class Gathers(DefaultAllGather):
    """Counts FSDP2's all-gathers and the bytes that this rank gives to them."""

    def __init__(self):
        self.calls = self.nbytes = 0

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.calls += 1
        self.nbytes += input_tensor.nbytes
        return super().__call__(output_tensor, input_tensor, group, async_op)


def count_gathers(model: nn.Module) -> Gathers:
    gathers = Gathers()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gathers)
    return gathers
